"""JSON Schema (draft 2020-12), exactly the keywords that the schemas here use; any other keyword is an error, never skipped.

Stricter than the draft in two things: an integer has no decimal point, and `$` at the end of a pattern is the end of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .document import read, same

ANNOTATIONS = {"$schema", "$defs", "title", "description"}
OF_SCHEMAS = {"oneOf", "allOf"}  # lists of schemas
BY_NAME = {"properties", "patternProperties", "$defs"}  # schemas by name
ONE = {"items", "additionalProperties", "if", "then", "else"}  # one schema
PLAIN = {"$ref", "const", "enum", "maxItems", "minItems", "minLength", "minProperties", "minimum", "pattern", "required", "type"}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float), "null": type(None)}


@cache
def load(name: str) -> dict[str, Any]:
    """A schema of the folder beside this file. ValueError for a keyword that `errors` doesn't know."""
    schema = read(Path(__file__).parent / "schemas" / f"{name}.schema.json")
    refuse_unknown(schema, name)
    return schema


def refuse_unknown(schema: Any, place: str) -> None:
    if isinstance(schema, bool):
        return
    if unknown := set(schema) - ANNOTATIONS - OF_SCHEMAS - BY_NAME - ONE - PLAIN:
        raise ValueError(f"schema {place}: unknown keyword {min(unknown)}")
    types = schema.get("type", [])
    if unknown := {types} - set(TYPES) if isinstance(types, str) else set(types) - set(TYPES):
        raise ValueError(f"schema {place}: unknown type {min(unknown)}")
    for key in OF_SCHEMAS & set(schema):
        for i, own in enumerate(schema[key]):
            refuse_unknown(own, f"{place}.{key}.{i}")
    for key in BY_NAME & set(schema):
        for name, own in schema[key].items():
            refuse_unknown(own, f"{place}.{key}.{name}")
    for key in ONE & set(schema):
        refuse_unknown(schema[key], f"{place}.{key}")


def errors(value: Any, schema: Any, root: dict[str, Any], place: str = "report") -> Iterator[str]:
    """What doesn't fit, a line each. root: the schema's own document, for its $ref."""
    if isinstance(schema, bool):
        if not schema:
            yield f"{place}: is not a known field"
        return
    if "$ref" in schema:
        yield from errors(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, place)
    yield from _plain(value, schema, place)
    if isinstance(value, dict):
        yield from _object(value, schema, root, place)
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from errors(item, schema["items"], root, f"{place}.{i}")
    for own in schema.get("allOf", ()):
        yield from errors(value, own, root, place)
    if "oneOf" in schema:
        found = [next(errors(value, own, root, place), None) for own in schema["oneOf"]]
        if found.count(None) != 1:
            yield " or ".join(dict.fromkeys(error for error in found if error)) or f"{place}: fits several forms"
    if "if" in schema:
        branch = "else" if any(errors(value, schema["if"], root, place)) else "then"
        yield from errors(value, schema.get(branch, True), root, place)


def _plain(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    types = schema.get("type")
    if types is not None:
        names = [types] if isinstance(types, str) else types
        if not any(isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names):
            yield f"{place}: is no {' or '.join(names)}"
            return
    if "const" in schema and not same(value, schema["const"]):
        yield f"{place}: is not {schema['const']}"
    if "enum" in schema and not any(same(value, choice) for choice in schema["enum"]):
        yield f"{place}: is none of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{place}: is too short"
        if "pattern" in schema and not _matches(schema["pattern"], value):
            yield f"{place}: does not match {schema['pattern']}"
    if isinstance(value, int | float) and not isinstance(value, bool) and value < schema.get("minimum", value):
        yield f"{place}: is below {schema['minimum']}"
    if isinstance(value, list) and not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{place}: has {len(value)} elements"


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], place: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}: has no {name}"
    if len(value) < schema.get("minProperties", 0):
        yield f"{place}: is empty"
    properties, patterns, rest = schema.get("properties", {}), schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    for name, own in value.items():
        matching = [patterns[pattern] for pattern in patterns if _matches(pattern, name)]
        matching += [properties[name]] if name in properties else []
        for subschema in matching or [rest]:
            yield from errors(own, subschema, root, f"{place}.{name}")


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text[:-1] + r"\Z" if text.endswith("$") else text)


def _matches(pattern: str, text: str) -> bool:
    return _pattern(pattern).search(text) is not None
