"""Keeps what is generated in helm/ true: `config` in values.schema.json, and README.md's tables.

Called by `make chart-docs`; a test compares. The rest of values.schema.json is written by hand and
is the one place that says what a value means; `config` is cluster/config.py's, key by key, without
the keys that the chart settles itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cluster.config import Config

HERE = Path(__file__).resolve().parent
SCHEMA, VALUES, README = HERE / "values.schema.json", HERE / "values.yaml", HERE / "README.md"
BEGIN, END = "<!-- values: made by `make chart-docs` -->", "<!-- end of values -->"
# Settled by templates/_serve_config.tpl, or another machine's business than a pod's; those that the
# configuration does not have do no harm.
SETTLED = frozenset(
    {
        "model.path_or_name",
        "model.served_name",
        "model.revision",
        "workers.prefill",
        "workers.decode",
        "workers.drain_s",
        "http.host",
        "http.port",
        "http.drain_s",
        "http.replicas",
        "http.through",
        "keys.file",
        "ray",
        "links",
        "tenants.keys_file",
        "state",
    }
)
Json = dict[str, Any]


def config_schema(section: type[BaseModel] = Config, prefix: str = "") -> Json:
    """The JSON schema of a part of the configuration, without what is settled; {} if all is."""
    shown = section.model_json_schema()
    properties: Json = {}
    for name, info in section.model_fields.items():
        key, inner = f"{prefix}{name}", info.annotation
        if key in SETTLED:
            continue
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found = config_schema(inner, f"{key}.")
            if found["properties"]:
                properties[name] = found
        else:
            kept = {
                word: what for word, what in shown["properties"][name].items() if word != "title"
            }
            properties[name] = _without_references(kept, shown.get("$defs", {}))
    return {
        "description": (section.__doc__ or "").strip(),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _without_references(node: object, definitions: Json) -> Any:  # noqa: ANN401 - JSON
    """Put definitions in the place of references to them: nothing else would find them."""
    if isinstance(node, dict):
        if "$ref" in node:
            name = str(node["$ref"]).rpartition("/")[2]
            return _without_references(definitions[name], definitions)
        return {key: _without_references(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_references(value, definitions) for value in node]
    return node


def schema(written: Json, values: Json) -> Json:
    """The schema with `config` as it is now; what has a default may not be taken away (null)."""
    found: Json = json.loads(json.dumps(written))
    of_config = found["properties"]["config"]
    of_config["properties"] = config_schema()["properties"]
    _require(found, values)
    return found


def _require(node: Json, values: Json) -> None:
    """State at each object which keys it must have: those that values.yaml gives. Mutates."""
    properties = node.get("properties", {})
    required = [key for key in values if key in properties]
    if required:
        node["required"] = required
    for key in required:
        if isinstance(values[key], dict):
            _require(properties[key], values[key])


def rows(node: Json, values: Json, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of each value."""
    for name, inner in node["properties"].items():
        key, text = f"{prefix}{name}", inner.get("description", "")
        if inner.get("properties") and inner["type"] == "object" and name != "affinity":
            yield f"**{key}**", "", text
            given = values.get(name)
            yield from rows(inner, given if isinstance(given, dict) else {}, f"{key}.")
        else:
            default = values[name] if name in values else inner.get("default")
            yield f"`{key}`", f"`{json.dumps(default)}`", text


def tables(found: Json, values: Json) -> str:
    """The table of values, as README.md has it."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in rows(found, values)
    ]
    return "\n".join(lines)


def readme(text: str, table: str) -> str:
    """README.md with the table between its marks. Raises ValueError where a mark is missing."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        message = f"README.md lacks {BEGIN} or {END}"
        raise ValueError(message)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def generated() -> dict[Path, str]:
    """Each file as it should be."""
    values: Json = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    found = schema(json.loads(SCHEMA.read_text(encoding="utf-8")), values)
    return {
        SCHEMA: json.dumps(found, indent=2, ensure_ascii=False) + "\n",
        README: readme(README.read_text(encoding="utf-8"), tables(found, values)),
    }


def main() -> int:
    """Write what has changed."""
    for path, text in generated().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
