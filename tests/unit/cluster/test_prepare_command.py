"""`headwater prepare`: one path that leads to the model, whatever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    head = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    weights = len(head).to_bytes(8, "little") + head + b"1234"
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def prepare(tmp_path: Path, *words: str) -> int:
    return cli.main(["prepare", "--cache-dir", str(tmp_path / "cache"), *words])


def test_the_link_leads_to_the_model_and_is_moved_to_another(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "below/model"
    assert prepare(tmp_path, "--model", str(model), "--link", str(link)) == 0
    assert link.resolve() == model
    assert capsys.readouterr().out == f"Model m is ready in {link}.\n"
    other = model.rename(tmp_path / "other")
    assert prepare(tmp_path, "--model", str(other), "--link", str(link)) == 0
    assert link.resolve() == other
    assert [*link.parent.iterdir()] == [link]


def test_a_folder_under_the_very_name_is_left_as_it_is(tmp_path: Path, model: Path) -> None:
    assert prepare(tmp_path, "--model", str(model), "--link", str(model)) == 0
    assert not model.is_symlink()


def test_what_is_in_the_links_place_is_not_replaced(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    assert prepare(tmp_path, "--model", str(model), "--link", str(taken)) == 1
    assert "give --link a path that is free" in capsys.readouterr().err
    assert taken.is_dir() and not taken.is_symlink()


def test_a_model_that_no_engine_could_serve_is_told_before_there_is_a_link(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "tokenizer.json").unlink()
    assert prepare(tmp_path, "--model", str(model), "--link", str(tmp_path / "l")) == 1
    assert "lacks a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "l").exists()
