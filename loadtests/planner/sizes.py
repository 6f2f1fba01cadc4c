"""Bytes as people write them, with the unit always named: GB is 10^9 bytes, GiB is 2^30.

Called by the whole planner. Must not: read or print a number of bytes without its unit; many
capacity sums that are passed around are wrong by the 7 % between the two.
"""

from __future__ import annotations

import re

GIB, GB = 1 << 30, 10**9
UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": GB,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": GIB,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BINARY = ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DECIMAL = ((10**12, "TB"), (GB, "GB"), (10**6, "MB"), (10**3, "kB"))


def parse_size(text: str) -> int:
    """Bytes of "80GB" or "80 GiB". Raises ValueError where no unit is named, or another one."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size, such as 80GB or 80GiB")
    number, unit = found.groups()
    if not unit:
        raise ValueError(f"{text!r} names no unit: {number}GB is 10^9 bytes each, {number}GiB 2^30")
    if unit.upper() not in UNITS:
        raise ValueError(f"{unit!r} is no unit of bytes: GB (10^9) or GiB (2^30), and their kin")
    return round(float(number) * UNITS[unit.upper()])


def binary(size_bytes: float) -> str:
    """In the largest binary unit that fits, such as 512 MiB."""
    return _in(size_bytes, _BINARY)


def decimal(size_bytes: float) -> str:
    """In the largest decimal unit that fits, such as 80 GB."""
    return _in(size_bytes, _DECIMAL)


def both(size_bytes: float) -> str:
    """In both, such as 512 MiB (536.9 MB)."""
    if size_bytes < 1 << 10:
        return f"{size_bytes:g} B"
    return f"{binary(size_bytes)} ({decimal(size_bytes)})"


def _in(size_bytes: float, units: tuple[tuple[int, str], ...]) -> str:
    for factor, name in units:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {name}"
    return f"{size_bytes:.4g} B"
