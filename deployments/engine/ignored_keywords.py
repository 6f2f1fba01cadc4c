"""Which keyword of a JSON schema the grammar backend would ignore.

xgrammar (0.2) makes a grammar of what it knows and leaves out the rest, so that an answer would
break its schema. vLLM (0.32) looks for some of it, names none, and does not look into structural
tags, which strict and required tools become. Called by grammar_checks.py. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Assertions that no grammar of xgrammar's keeps, whatever stands beside them.
_NEVER_KEPT = (
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
# xgrammar reads the first of these that it finds, and nothing beside it.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_ASSERTIONS = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minItems", "maxItems", "items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("properties", "required", "minProperties", "maxProperties", "patternProperties"),
        *("propertyNames", "additionalProperties", "unevaluatedProperties", *_ALONE),
    }
)
_FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)
_SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "prefixItems", "anyOf", "oneOf", "allOf"),
    }
)
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def ignored_keyword(schema: object) -> tuple[str, str] | None:
    """The keyword and where it stands, as $.properties.x; None where all is kept."""
    for where, each in _schemas_in(schema):
        keyword = _ignored_in(each)
        if keyword is not None:
            return keyword, where
    return None


def schemas_of_tag(tag: object) -> Iterator[object]:
    """The JSON schemas in a structural tag, of its old form and of its new one."""
    left = [tag]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            for name, value in each.items():
                if name in {"schema", "json_schema"}:
                    yield value
                else:
                    left.append(value)
        elif isinstance(each, list):
            left += each


def _schemas_in(schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and those below it. A property may have any name: it is no keyword."""
    left = [("$", schema)]
    while left:
        where, each = left.pop()
        if isinstance(each, list):
            left += [(f"{where}[{at}]", item) for at, item in enumerate(each)]
        if not isinstance(each, dict):
            continue
        yield where, each
        for name, value in each.items():
            if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
                left += [(f"{where}.{name}.{key}", item) for key, item in value.items()]
            elif name in _SCHEMAS:
                left.append((f"{where}.{name}", value))


def _ignored_in(schema: dict[str, Any]) -> str | None:
    for keyword in _NEVER_KEPT:
        if keyword in schema and schema[keyword] is not False:
            return keyword
    first = next((name for name in _ALONE if name in schema), None)
    if first is not None:
        beside = (name for name in schema if name in _ASSERTIONS and name != first)
        return next(beside, _of_all_of(schema))
    return _of_strings(schema) or _of_objects(schema)


def _of_all_of(schema: dict[str, Any]) -> str | None:
    all_of = schema.get("allOf")
    return "allOf" if isinstance(all_of, list) and len(all_of) > 1 else None


def _of_strings(schema: dict[str, Any]) -> str | None:
    if "format" in schema and schema["format"] not in _FORMATS:
        return "format"
    if "pattern" in schema and "format" in schema:
        return "pattern"
    if "pattern" in schema or "format" in schema:
        return next((name for name in ("minLength", "maxLength") if name in schema), None)
    return None


def _of_objects(schema: dict[str, Any]) -> str | None:
    if "propertyNames" in schema:
        others = ("properties", "patternProperties")
        if any(name in schema for name in others):
            return "propertyNames"
        if schema.get("unevaluatedProperties", True) is not True:
            return "unevaluatedProperties"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and ("properties" in schema or len(patterns) > 1):
        return "patternProperties"
    return None
