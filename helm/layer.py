"""Writes Headwater's code as one archive, which a ConfigMap brings to pods of Ray's own image.

Called by `make chart-layer`. Equal sources make an equal file. What it holds, helm/files/install.sh
unpacks below /opt/headwater; the packages are installed from the lock inside it, by the launcher.
"""

from __future__ import annotations

import argparse
import io
import lzma
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "deployments", "kvcache", "router", "loadtests")
# The launcher adds up: the build's own lock, and for CPUs the two that it looks for torch with.
LOCKS = {
    "cpu": ("serve.lock", "cpu-torch.lock", "cpu-torch-cuda.lock"),
    "gpu": ("gpu.lock",),
}
SUFFIXES = {".py", ".html", ".js", ".css", ".svg"}
# Of a ConfigMap, all its keys together (Kubernetes' own limit).
BYTES_MAX = 1 << 20


def sources(build: str, root: Path = ROOT) -> list[Path]:
    """The files, by path."""
    found = [root / "headwater", root / "LICENSE", root / "pyproject.toml"]
    found += [root / "requirements" / name for name in LOCKS[build]]
    for package in PACKAGES:
        found += [path for path in (root / package).rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


def archive(build: str, root: Path = ROOT) -> bytes:
    """The archive. Raises ValueError if no ConfigMap could hold it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sources(build, root):
            entry = tarfile.TarInfo(f"code/{path.relative_to(root)}")
            entry.size = path.stat().st_size
            entry.mode = 0o755 if path.name == "headwater" else 0o644
            with path.open("rb") as stream:
                tar.addfile(entry, stream)
    packed = lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    if len(packed) > BYTES_MAX:
        message = f"{len(packed)} bytes, but a ConfigMap holds {BYTES_MAX}: build an image instead"
        raise ValueError(message)
    return packed


def main() -> int:
    """Write it, and say what to do with it."""
    parser = argparse.ArgumentParser(description="Headwater's code as an archive for a ConfigMap")
    parser.add_argument("--build", choices=sorted(LOCKS), default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "build/headwater-layer.tar.xz")
    arguments = parser.parse_args()
    packed = archive(arguments.build)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(packed)
    sys.stdout.write(
        f"wrote {arguments.output} ({len(packed)} bytes). Bring it to a cluster:\n"
        "  kubectl create configmap headwater-layer --dry-run=client -o yaml \\\n"
        f"    --from-file=layer.tar.xz={arguments.output} | kubectl replace --force -f -\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
