"""Keys in an ingress: what requests pay, what refusals count as, what is published."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.edge.edge_counts import EdgeCounts
from deployments.edge.key_file import KeySettings
from deployments.edge.key_gate import REFUSALS
from deployments.edge.keys import KeyScope
from deployments.edge.tenants import Tenants
from deployments.flow.flow_types import Intake, Outcome, Role
from deployments.flow.request_record import AttemptRecord, RecordStore, RequestRecord
from deployments.ingress.keyed_access import KeyedAccess
from deployments.measures import ingress_list as named
from tests.unit.deployments.key_world import ANN, SECRET, Behind, ask, bearer, everybody, write
from tests.unit.deployments.recorded_metrics import Recorded, install

API = "/v1/chat/completions"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def access(path: Path, counts: EdgeCounts | None = None) -> KeyedAccess:
    settings = KeySettings(str(path), required=True, reload_s=60)
    return KeyedAccess(settings, SECRET, Tenants(SECRET), "m", counts or EdgeCounts())


def ended(
    records: RecordStore, key: str, prompt: int, output: int, *, attempted: bool = True
) -> None:
    intake = Intake("r", "t", "m", prompt, (), 5, 0, 4096, 0.0, 0.0, None, key=key)
    record = RequestRecord.of(intake)
    record.output_tokens = output
    if attempted:
        record.attempts.append(AttemptRecord("a", "w", Role.PREFILL, "new", 0.0, 0))
    records.ended(intake, record, ())


@pytest.mark.usefixtures("told")
async def test_a_request_that_ends_pays_with_its_tokens_and_is_told_to_the_others_too(
    tmp_path: Path,
) -> None:
    keys, records, heard = (
        access(write(tmp_path / "k", everybody())),
        RecordStore(),
        list[Intake](),
    )
    records.on_end = lambda intake, _record, _tokens: heard.append(intake)
    keys.charge_for(records)
    gate = keys.gate_round(Behind())
    assert (await ask(gate, API, bearer(ANN), method="POST")).status == 200
    ended(records, "ann", 100, 7)
    ended(records, "ann", 10, 0)
    ended(records, "ann", 5000, 0, attempted=False)  # no worker was there
    ended(records, "", 1000, 1000)  # of nobody's
    ended(records, "gone", 1, 1)
    told = {one["name"]: one for one in keys.as_json(0.0)["keys"]}
    assert told["ann"]["tokens_total"] == 117
    assert told["ben"]["tokens_total"] == 0
    assert len(heard) == 5
    keys.close()


@pytest.mark.usefixtures("told")
async def test_what_the_gate_refuses_is_a_refused_request_where_it_asked_for_tokens(
    tmp_path: Path,
) -> None:
    counts = EdgeCounts()
    keys = access(write(tmp_path / "k", everybody()), counts)
    gate = keys.gate_round(Behind())
    await ask(gate, API, method="POST")
    await ask(gate, f"{API}/", bearer("wrong"), method="POST")
    await ask(gate, API, method="GET")
    await ask(gate, "/headwater/status", bearer(ANN))
    assert counts.outcomes[Outcome.REFUSED] == 2
    assert counts.refused_by_status == {401: 2}
    keys.close()


async def test_the_metrics_tell_reasons_and_counts_and_no_names(
    told: Recorded, tmp_path: Path
) -> None:
    path = write(tmp_path / "k", everybody())
    keys = access(path)
    gate = keys.gate_round(Behind())
    await ask(gate, API)
    await ask(gate, API, bearer("wrong"))
    await ask(gate, API, bearer("wrong"))
    path.write_text("{")
    keys._keys.look()
    keys._metrics.publish(gate, keys._keys)
    keys._metrics.publish(gate, keys._keys)  # the same totals add nothing
    assert told.by(named.REFUSED_BY_KEYS, "reason") == {"missing": 1, "unknown": 2}
    # The secret's own is an operator's, too.
    assert told.by(named.KEYS, "scope") == {"api": 2, "operator": 2}
    assert told.value(named.KEYS_FAILURES) == 1
    assert keys.problems()[0].startswith("keys.file ")
    assert not [series for series in told.values.items() if "ann" in str(series)]
    path.write_bytes(write(tmp_path / "good", everybody()).read_bytes())
    keys._keys.look()
    keys._metrics.publish(gate, keys._keys)
    assert told.value(named.KEYS_FAILURES) == 1
    assert keys.problems() == []
    keys.close()


def test_the_list_of_metrics_has_each_reason_and_scope() -> None:
    assert named.KEY_REFUSALS == REFUSALS
    assert named.KEYS.labels["scope"] == tuple(KeyScope)


@pytest.mark.usefixtures("told")
async def test_a_file_that_is_followed_no_more_is_a_fault(tmp_path: Path) -> None:
    keys = access(write(tmp_path / "k", everybody()))
    keys.gate_round(Behind())
    assert keys.faults() == []
    tasks = list(keys._tasks)
    keys.close()
    await asyncio.wait(tasks)
    assert keys.faults() == [
        "background task keys has ended",
        "background task key metrics has ended",
    ]
