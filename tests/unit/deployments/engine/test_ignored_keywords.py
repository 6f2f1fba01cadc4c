"""Keywords that the grammar backend would ignore, wherever they stand; none that it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.engine.ignored_keywords import ignored_keyword, schemas_of_tag

IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", {"multipleOf": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"contains": {"const": 1}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("not", {"not": {}}),
    ("if", {"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"dependentSchemas": {"a": {}}}),
    ("allOf", {"allOf": [{"type": "string"}, {"minLength": 3}]}),
    ("maxLength", {"$ref": "#/$defs/a", "maxLength": 3}),
    ("required", {"anyOf": [{"type": "object"}], "required": ["a"]}),
    ("maxLength", {"enum": ["a", "bcd"], "maxLength": 1}),
    ("format", {"type": "string", "format": "idn-email"}),
    ("minLength", {"type": "string", "pattern": "^a+$", "minLength": 2}),
    ("propertyNames", {"properties": {}, "propertyNames": {"pattern": "^a"}}),
    ("patternProperties", {"patternProperties": {"^a": {}, "^b": {}}}),
]
PLACES: list[tuple[str, Any]] = [
    ("$", lambda s: s),
    ("$.properties.not", lambda s: {"properties": {"not": s}}),
    ("$.items", lambda s: {"type": "array", "items": s}),
    ("$.prefixItems[1]", lambda s: {"prefixItems": [{}, s]}),
    ("$.anyOf[0]", lambda s: {"anyOf": [s, {"type": "null"}]}),
    ("$.$defs.a", lambda s: {"$defs": {"a": s}}),
    ("$.additionalProperties", lambda s: {"additionalProperties": s}),
]
KEPT: list[Any] = [
    True,
    {"type": "integer", "minimum": 0, "exclusiveMaximum": 9},
    {"type": "string", "minLength": 1, "maxLength": 9},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": False},
    {"type": "string", "enum": ["a", "b"], "title": "T", "default": "a"},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "not"},
    {"$ref": "#/$defs/a", "description": "d", "$defs": {"a": {"type": "string"}}},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}},
    {"properties": {"multipleOf": {"type": "integer"}, "format": {"type": "string"}}},
    {"const": {"uniqueItems": True}},
    {"type": "string", "examples": [{"not": 1}]},
    {"additionalProperties": False, "required": ["a"], "properties": {"a": {"type": "null"}}},
]


@pytest.mark.parametrize(("keyword", "schema"), IGNORED)
@pytest.mark.parametrize(("where", "put"), PLACES)
def test_ignored_keyword_is_found(
    keyword: str, schema: dict[str, Any], where: str, put: Any
) -> None:
    assert ignored_keyword(put(schema)) == (keyword, where)


@pytest.mark.parametrize("schema", KEPT)
def test_kept_schema_has_no_ignored_keyword(schema: Any) -> None:
    assert ignored_keyword(schema) is None


def test_schemas_of_both_forms_of_tags_are_found() -> None:
    schema = {"type": "integer"}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [
        {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]},
        {"format": {"type": "triggered_tags", "tags": [{"begin": "", "content": content}]}},
    ]
    assert [list(schemas_of_tag(tag)) for tag in tags] == [[schema], [schema]]


def test_deep_schema_is_read() -> None:
    schema: dict[str, Any] = {"multipleOf": 2}
    for _ in range(3000):
        schema = {"items": schema}
    found = ignored_keyword(schema)
    assert found is not None
    assert found[0] == "multipleOf"
