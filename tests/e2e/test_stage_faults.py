"""With real engines: a fault in a stage of a request's life, of the table in tests/leaks/matrix.py.

One cell a fault runs with the other tests; all 49 by `make chaos`. stage_faults.py says how a stage
is held and proven; the `ledger` fixture ends each cell with all books at their baseline, within 30
seconds, one lease time-out, from when all workers are back.
"""

from __future__ import annotations

import pytest

from tests.e2e.client import reference
from tests.e2e.conftest import START_TIMEOUT_S, Cluster
from tests.e2e.stage_faults import TOKENS, Held, held, hit, token_ids
from tests.equality import check_tokens
from tests.leaks.matrix import CELLS, Fault, Stage
from tests.waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.chaos, pytest.mark.slow]

# Those that other tests of this folder do not show in their own words, in the stage that is worst.
ALWAYS = {
    (Stage.PUBLISHED, Fault.CLIENT_ABORT),
    (Stage.LOADING, Fault.DEADLINE),
    (Stage.PREFILLING, Fault.PREFILL_KILLED),
    (Stage.HANDING_OVER, Fault.DECODE_KILLED),
    (Stage.HANDING_OVER, Fault.AGENT_KILLED),
    (Stage.DECODING, Fault.DIRECTORY_KILLED),
    (Stage.DECODING, Fault.INGRESS_KILLED),
}


def cells() -> list[object]:
    return [
        pytest.param(
            *cell,
            marks=[] if cell in ALWAYS else [pytest.mark.matrix],
            id=f"{cell[0]}-{cell[1]}",
        )
        for cell in CELLS
    ]


def notes_of(one: Held) -> list[str]:
    """What the ingress's log says of it."""
    return [what for _, subject, what in one.cluster.event_log() if one.name in subject]


@pytest.mark.parametrize(("stage", "fault"), cells())
def test_a_fault_in_a_stage_with_real_engines_leaves_nothing_behind(
    cluster: Cluster, stage: Stage, fault: Fault
) -> None:
    seed = 50_000 + 100 * CELLS.index((stage, fault))
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="ready")
    with held(cluster, stage, seed) as one:
        hit(one, fault)
        if fault is Fault.CLIENT_ABORT:
            wait_until(
                lambda: f"abort in stage {stage.seen_by_ingress}" in notes_of(one),
                timeout_s=START_TIMEOUT_S,
                what=lambda: f"the abort while it is held: {notes_of(one)}",
            )
        one.go_on()
        if fault not in {Fault.CLIENT_ABORT, Fault.INGRESS_KILLED}:
            one.raw.read_until(lambda got: b"data: [DONE]" in got)
    wait_until(cluster.is_ready, timeout_s=START_TIMEOUT_S, what="ready again")
    notes = notes_of(one)
    if fault is Fault.INGRESS_KILLED:
        assert notes == []  # another life
        assert b"data: [DONE]" not in one.raw.received
    elif fault is not Fault.CLIENT_ABORT:
        expected = reference(cluster, one.ids, max_tokens=TOKENS, ignore_eos=True)
        check_tokens(token_ids(one.raw), expected)
        given = [note.split()[2] for note in notes if note.startswith("submitted")]
        is_lost = fault == f"{stage.role}_killed" or fault is Fault.DEADLINE
        # Elsewhere from the tokens so far, where its worker died, or stood for longer than a link.
        assert (given.count(one.holder["id"]) == 1 and given[-1] != one.holder["id"]) or not is_lost
