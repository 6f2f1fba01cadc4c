"""Headwater answers as plain vLLM's own server did (tests/references) to several hundred requests.

Compared are status, headers that say what an answer is, the whole body (structure, types, text,
token ids, reasons, usage; logprobs within a tolerance), and of streams the sequence of events
(normal_form.py says what is given up of it). Differences that stay are listed in known.py.
"""

from __future__ import annotations

import re
import sys
import zlib

import pytest

from tests.e2e.conftest import AT_ONCE, Cluster
from tests.e2e.parity.asking import Ask
from tests.e2e.parity.comparison import Difference
from tests.e2e.parity.corpus import ASKS
from tests.e2e.parity.known import KNOWN, NOT_COMPARED, Known, unexplained
from tests.e2e.parity.normal_form import compare
from tests.e2e.parity.replies import replies_to
from tests.equality import TIE_NATS, TIED_SHARE_MAX
from tests.references import Recorded, reply_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Compared = dict[str, list[Difference]]
APIS = list(dict.fromkeys(ask.name.partition(":")[0] for ask in ASKS))
SHORT_SHARE = 4


def short_suite() -> list[Ask]:
    """One in SHORT_SHARE requests, the same ones each time, and all with a known difference.

    Requests of one salt stay together: the second finds what the first has left in the caches.
    """
    known = {name for entry in (*KNOWN, *NOT_COMPARED) for name in entry.names}
    salts = {ask.salt or ask.name for ask in ASKS if ask.name in known}
    salts |= {
        salt
        for salt in (ask.salt or ask.name for ask in ASKS)
        if zlib.crc32(salt.encode()) % SHORT_SHARE == 0
    }
    return [ask for ask in ASKS if (ask.salt or ask.name) in salts]


@pytest.fixture(scope="module")
def compared(
    cluster: Cluster, parity_reference: dict[str, Recorded], request: pytest.FixtureRequest
) -> Compared:
    """The differences of the requests, after Headwater has answered them, but for ties."""
    asks = short_suite() if request.config.getoption("--quick") else ASKS
    ours = replies_to(cluster.http, asks, AT_ONCE)
    found = {name: compare(reply_of(parity_reference[name]), ours[name]) for name in ours}
    ties = {
        name
        for name, recorded in parity_reference.items()
        if recorded.lead_min < TIE_NATS["float32"] and unexplained(name, found.get(name, ()))
    }
    sys.stdout.write(f"\n{len(asks)} replies compared, {len(ties)} ties: {sorted(ties)}\n")
    assert len(ties) <= TIED_SHARE_MAX * len(asks)
    return {name: differences for name, differences in found.items() if name not in ties}


@pytest.mark.parametrize("api", APIS)
def test_every_reply_equals_that_of_plain_vllm(compared: Compared, api: str) -> None:
    of_api = {name: found for name, found in compared.items() if name.startswith(f"{api}:")}
    assert of_api
    wrong = {name: unexplained(name, found) for name, found in of_api.items()}
    told = [f"{name}\n    {difference}" for name, found in wrong.items() for difference in found]
    assert not told, "\n" + "\n".join(told)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.names or '*'} {known.paths}")
def test_known_difference_still_occurs(compared: Compared, known: Known) -> None:
    shown = {
        name
        for name, found in compared.items()
        if any(known.covers(name, difference) for difference in found)
    }
    assert shown, known
    assert set(known.names) <= shown, known


def test_every_route_of_plain_vllm_is_asked(parity_reference: dict[str, Recorded]) -> None:
    interface = reply_of(parity_reference["tokens: interface"]).body
    routes = {
        (method.upper(), path) for path, methods in interface["paths"].items() for method in methods
    }
    assert len(routes) >= 20
    asked = [(ask.method, ask.path.partition("?")[0]) for ask in ASKS]
    unasked = {
        (method, path)
        for method, path in routes
        if not any(
            method == by and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), where)
            for by, where in asked
        )
    }
    assert not unasked
