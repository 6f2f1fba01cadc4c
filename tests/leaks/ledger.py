"""All books of a site: each must come back to its baseline, and they must agree with each other."""

from __future__ import annotations

import time

from tests.leaks.site import Site
from tests.waiting import wait_until


def leftovers(here: Site) -> list[str]:
    """Everything that is not at its baseline, in words."""
    found = [
        f"{process.name}: {count} {what}"
        for process in (here.ingress, *here.workers.values())
        for what, count in process.call("leftovers").items()
        if count
    ]
    if not here.is_linked():
        found.append(f"links are {here.ingress.call('links')}")
    ledger = here.cluster.call("agent_ledger")
    status = here.cluster.call("directory_status")
    if ledger is None or status is None:
        return [*found, "agent or directory does not answer"]
    books, scan = ledger["books"], ledger["scan"]
    found += [
        f"agent: {books[what]} {what}"
        for what in (
            "leases",
            "waits",
            "fills",
            "leased_slots",
            "filling",
            "quarantined",
            "retired",
        )
        if books[what]
    ]
    found += [
        f"agent: {what} is {books[what]}, but {scan[what]} in the slot table"
        for what in books
        if what not in {"leases", "waits", "fills", "counters"} and books[what] != scan[what]
    ]
    slab = (f"slab:{here.where['node']}", books["published"], "exact")
    known = [(one["source"], one["blocks"], one["freshness"]) for one in status["streams"]]
    if slab not in known:
        found.append(f"directory: {known}, not {slab}")
    if slab not in here.ingress.call("directory"):
        found.append(f"ingress's replica: {here.ingress.call('directory')}, not {slab}")
    return found


def wait_clean(here: Site, timeout_s: float) -> float:
    """Seconds to a clean ledger, from now on: from when the last process of the site stood."""
    began_s, found = time.monotonic(), ["not looked yet"]

    def clean() -> bool:
        found[:] = leftovers(here)
        return not found

    wait_until(clean, timeout_s=timeout_s, what=lambda: f"clean ledger, but {found}")
    return time.monotonic() - began_s
