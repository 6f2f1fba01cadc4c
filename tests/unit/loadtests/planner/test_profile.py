from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.planner.profile import Compared, Profile, StepPoint, Validation
from tests.unit.loadtests.planner.laws import profile, service_ms, step_ms


def validation(error: float, *, load: str = "a load", counts: bool = True) -> Validation:
    figures = (
        Compared("TPOT mean, ms", 33.0, 30.0, 30.0),
        Compared("TTFT p95, ms", 500.0, 100 * (1 + error), 100.0, counts=counts),
    )
    return Validation(load, "2026-01-02", 40, figures, ("a note",))


def test_fits_say_what_was_measured() -> None:
    found = profile()
    assert found.service_ms(1000, 200) == pytest.approx(service_ms(1000, 200))
    assert found.step_ms(7, 700) == pytest.approx(step_ms(7, 700))
    assert found.handover_ms(20) == pytest.approx(40)
    assert found.token_ms == pytest.approx(2)


def test_each_fit_is_told_with_its_points_and_its_error() -> None:
    told = "\n".join(profile().fit_lines())
    assert "2.000 ms a new token" in told
    assert "6 points, n = 18; fit error 0.0% on average" in told
    assert "hand-over: 30.0 ms + 0.50 ms a block" in told
    assert "hand-over" not in "\n".join(profile(handover=()).fit_lines())


def test_a_point_that_obeys_no_law_shows_in_the_error() -> None:
    found = profile(steps=(*profile().steps, StepPoint(2, 64, 90.0, 30)))
    most = found.fit_errors()["step"].most
    assert most is not None and most > 0.5


def test_a_profile_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    found = profile().validated(validation(0.05))
    found.save(tmp_path / "p.json")
    assert Profile.read(tmp_path / "p.json") == found
    assert json.loads((tmp_path / "p.json").read_text())["fits"]["prefill_ms"][1] == pytest.approx(
        2
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "no format"),
        ({"prefill": []}, "no points"),
        ({"steps": [{"batch": 1}]}, "not a profile"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_file_that_is_no_profile_is_named(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**profile().as_json(), **change}))
    with pytest.raises(ValueError, match=named):
        Profile.read(path)


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ValueError, match="not a profile"):
        Profile.read(tmp_path / "p.json")


def test_a_profile_that_nobody_validated_says_so() -> None:
    assert "none yet" in profile().trust_lines()[0]


def test_errors_of_validations_are_told_and_below_10_percent_are_good() -> None:
    told = profile().validated(validation(0.05)).trust_lines()
    assert "TTFT p95, ms, +5.0%" in told[0] and "n = 40" in told[0]
    assert "Confidence: good near these loads; errors were at most 5.0%" in told[-1]


@pytest.mark.parametrize("error", [0.11, -0.4])
def test_above_10_percent_the_plan_says_not_to_trust_it(error: float) -> None:
    found = profile().validated(validation(0.01)).validated(validation(error, load="another"))
    told = found.trust_lines()
    assert len(told) == 3
    assert "DO NOT TRUST" in told[-1] and f"{abs(error):.0%}" in told[-1]


def test_a_figure_that_so_few_requests_cannot_tell_does_not_count() -> None:
    found = profile().validated(validation(0.5, counts=False))
    assert found.validations[0].worst.name == "TPOT mean, ms"
    assert "good" in found.trust_lines()[-1]


def test_a_new_validation_of_a_load_replaces_the_old_one() -> None:
    found = profile().validated(validation(0.5)).validated(validation(0.05))
    assert len(found.validations) == 1
    assert "good" in found.trust_lines()[-1]


def test_what_lies_beyond_the_measured_is_told() -> None:
    assert profile().outside(new=1600, batch=16, context=1600) == []
    told = profile().outside(new=8000, batch=64, context=9000)
    assert told[0] == "prompts of 8,000 (measured up to 1,536)"
    assert len(told) == 3


def test_a_plain_server_has_no_hand_over() -> None:
    assert replace(profile(), handover=()).handover_ms(20) == 0
