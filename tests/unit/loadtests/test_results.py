from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.results import (
    EXIT_MISSED,
    Section,
    Setting,
    Table,
    Target,
    report,
    write,
)

SETTING = Setting("2030-01-02", ("CPU: one", "cores: 2 usable"), ("Python 3", "ray 2"), "abc", 0.5)
LATER = Setting("2030-02-03", ("CPU: other", "cores: 4 usable"), ("Python 4", "ray 3"), "def", 0.25)


def section(name: str, value: str, missed: tuple[str, ...] = ()) -> Section:
    table = Table(("part", "ms"), (("all of it", value),))
    return Section(name, f"About {name}", ("n = 3 rounds.",), (table,), missed)


def block(text: str, name: str) -> str:
    return text.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "RESULTS.md"


def test_a_new_file_says_where_and_when_and_what(path: Path) -> None:
    write(path, section("slab", "17"), SETTING)
    text = path.read_text()
    header, body = block(text, "header"), block(text, "slab")
    for said in ("CPU: one", "cores: 2 usable", "Python 3, ray 2", "2030-01-02"):
        assert said in header
    for said in (
        "## About slab",
        "n = 3 rounds.",
        "| all of it |  17 |",
        "2030-01-02",
        "began 0.5",
    ):
        assert said in body


def test_writing_one_section_leaves_the_others_and_peoples_words(path: Path) -> None:
    write(path, section("slab", "17"), SETTING)
    write(path, section("routing", "5"), SETTING)
    path.write_text(path.read_text() + "\nA person's remark.\n")
    before = path.read_text()
    write(path, section("slab", "99"), LATER)
    after = path.read_text()
    assert block(after, "routing") == block(before, "routing")
    assert "99" in block(after, "slab") and "17" not in after
    assert after.endswith("\nA person's remark.\n")
    assert "CPU: other" in block(after, "header") and "CPU: one" in block(after, "routing")


def test_rewriting_the_same_changes_nothing(path: Path) -> None:
    write(path, section("slab", r"1\2"), SETTING)
    write(path, section("routing", "5"), SETTING)
    before = path.read_text()
    write(path, section("slab", r"1\2"), SETTING)
    assert path.read_text() == before


def test_a_missed_target_is_said_and_is_an_exit_code_of_its_own(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(section("slab", "17"), path) == 0
    assert "Missed" not in path.read_text()
    assert report(section("slab", "17", ("too slow",)), path) == EXIT_MISSED
    assert "**Missed:** too slow" in block(path.read_text(), "slab")
    assert "**Missed:** too slow" in capsys.readouterr().out


def test_without_a_file_it_is_only_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(section("slab", "17"), None)
    assert "| all of it |  17 |" in capsys.readouterr().out
    assert not path.exists()


def test_a_table_is_aligned_markdown() -> None:
    table = Table(("part", "p50"), (("a", "1.5"), ("longer", "12345.0")))
    assert table.lines() == [
        "| part   |     p50 |",
        "| ------ | ------: |",
        "| a      |     1.5 |",
        "| longer | 12345.0 |",
    ]


def test_a_row_of_another_length_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        Table(("part", "p50"), (("a",),))


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target.floor(0.5), 0.5, True),
        (Target.floor(0.5), 0.49, False),
        (Target.ceiling(50), 50, True),
        (Target.ceiling(50), 50.1, False),
    ],
)
def test_a_target_is_kept_up_to_its_bound(target: Target, value: float, *, met: bool) -> None:
    assert target.is_met(value) is met
    assert target.verdict(value).endswith("met" if met else "MISSED")


def test_the_setting_of_this_machine_is_complete() -> None:
    here = Setting.here()
    assert here.date and here.revision
    assert all(line.partition(": ")[2] for line in here.machine)
    assert any(version.startswith("ray ") for version in here.versions)


def test_what_may_be_said_of_the_figures_stands_before_them(path: Path) -> None:
    table = Table(("part", "ms"), (("all of it", "17"),))
    write(path, Section("x", "About x", ("n = 3.",), (table,), reading=("Ours loses.",)), SETTING)
    body = block(path.read_text(), "x")
    assert body.index("**Ours loses.**") < body.index("n = 3.") < body.index("all of it")
