"""values.schema.json: closed, explained, in step with the configuration; README's table from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster import config_sources
from cluster.config import Config
from helm import generate
from tests.helm.chart import CHART, VALUES_FILES, Json

SCHEMA: Json = json.loads(generate.SCHEMA.read_text(encoding="utf-8"))
VALUES: Json = yaml.safe_load(generate.VALUES.read_text(encoding="utf-8"))


def nodes(node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Each value's schema, by its path."""
    for name, inner in node.get("properties", {}).items():
        yield f"{path}{name}", inner
        yield from nodes(inner, f"{path}{name}.")
    if isinstance(node.get("items"), dict):
        yield f"{path}[]", node["items"]
        yield from nodes(node["items"], f"{path}[].")


ALL = dict(nodes(SCHEMA))


def test_what_is_generated_is_as_it_would_be_now() -> None:
    for path, text in generate.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make chart-docs`"


def test_every_value_is_explained() -> None:
    for path, node in ALL.items():
        assert len(node.get("description", "")) >= 5, path
        assert node["description"].endswith((".", "one.", "mounted.")), path


def test_no_object_takes_what_it_does_not_know() -> None:
    assert SCHEMA["additionalProperties"] is False
    kinds: dict[str, int] = {"closed": 0, "map of texts": 0, "Kubernetes' own": 0}
    for path, node in ALL.items():
        if node.get("type") != "object":
            continue
        if node.get("additionalProperties") is False:
            kinds["closed"] += 1
        elif node.get("additionalProperties") == {"type": "string"}:
            kinds["map of texts"] += 1
        else:
            assert node["description"].startswith("Kubernetes' own"), path
            kinds["Kubernetes' own"] += 1
    assert min(kinds.values()) > 0


def test_every_value_has_a_default_and_every_default_a_place() -> None:
    def leaves(values: Json, path: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield f"{path}{name}"
            if isinstance(value, dict):
                yield from leaves(value, f"{path}{name}.")

    given = {*leaves(VALUES)}
    maps = [path for path, node in ALL.items() if "properties" not in node]
    assert {path for path in given if not any(path.startswith(f"{m}.") for m in maps)} <= ALL.keys()
    optional = {path for path in ALL if path.startswith("config.") or "[]" in path}
    optional |= {path for path in ALL if ".affinity." in path}
    assert ALL.keys() - optional - given == set()


@pytest.mark.parametrize("path", [generate.VALUES, *VALUES_FILES], ids=lambda path: path.name)
def test_each_values_file_suits_the_schema(path: Path) -> None:
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(_over(VALUES, own))


def _over(below: Json, above: Json) -> Json:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def test_the_configurations_keys_are_the_products_but_for_those_that_the_chart_settles() -> None:
    shown = {
        path.removeprefix("config.")
        for path, node in ALL.items()
        if path.startswith("config.") and "properties" not in node and not path.endswith(".[]")
    }
    own = {key for key, _ in config_sources.leaves()}
    hidden = own - shown
    assert shown <= own
    assert hidden == {
        key
        for key in own
        if any(key == one or key.startswith(f"{one}.") for one in generate.SETTLED)
    }
    for name, info in config_sources.leaves():
        if name in shown:
            assert ALL[f"config.{name}"]["description"] == info.description


def test_defaults_that_the_chart_computes_with_are_the_products() -> None:
    own = Config()
    config = VALUES["config"]
    assert config["model"]["dtype"] != own.model.dtype == "auto"
    assert config["engine"]["kv_cache_mib"] != own.engine.kv_cache_mib == "auto"
    assert config["slab"]["mib"] == own.slab.mib
    assert config["workers"]["cores_per_worker"] != own.workers.cores_per_worker == "auto"
    assert config["workers"]["tensor_parallel_size"] == own.workers.tensor_parallel_size


def test_the_readme_tells_of_each_values_file() -> None:
    text = (CHART / "README.md").read_text(encoding="utf-8")
    for path in VALUES_FILES:
        assert f"values/{path.name}" in text


def test_a_readme_without_marks_is_refused_and_not_emptied() -> None:
    with pytest.raises(ValueError, match="lacks"):
        generate.readme("# Nothing\n", "| table |")
