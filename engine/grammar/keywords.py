"""JSON schemas' keywords as llguidance reads them: bounds of numbers, patterns without look-around, names of members.

All of it is about one schema by itself, not about what holds beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

#: The most digits of a number before its point, unless its schema has wider bounds, and after it.
DIGITS: Final = 15
DECIMALS: Final = 10
MOST: Final = 10**DIGITS - 1
#: A number is to be a multiple of this: then it has at most DECIMALS decimals, and no exponent. llguidance reads no
#: finer power of ten.
STEP: Final = 1e-10
#: Fewest steps between the bounds of a number for which it is bounded to steps.
_FEWEST: Final = 10
#: The widest bounds that llguidance reads, of integers and of numbers.
_INTEGERS: Final = (-(2**63) + 1024, 2**63 - 1)
_NUMBERS: Final = (-9 * 10**18, 9 * 10**18)
#: The formats that llguidance follows. Any other only describes.
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: The most characters of texts in formats whose digits have no end: nine decimals of a second, a duration of two digits
#: in each place and more.
LONGEST: Final = {"date-time": 35, "time": 24, "duration": 30}
#: Keywords that constrain a value, and that llguidance cannot follow.
UNSUPPORTED: Final = frozenset(
    {
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
#: Keywords with schemas that hold for the same value.
ALTERNATIVES: Final = ("anyOf", "oneOf")
IN_PLACE: Final = ("allOf", *ALTERNATIVES)
LOW: Final = ("minimum", "exclusiveMinimum")
HIGH: Final = ("maximum", "exclusiveMaximum")
#: Keywords with schemas by names of the caller's own.
DEFINITIONS: Final = frozenset({"$defs", "definitions"})
BY_NAME: Final = ("properties", "patternProperties", *sorted(DEFINITIONS))
TYPES: Final = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
#: Keywords that constrain nothing, of those that llguidance knows.
ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "readOnly", "writeOnly", "deprecated"),
        *("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "example", "$schema"),
    }
)
#: The keywords that llguidance knows. Beside a reference or alternatives it takes any other for a further schema.
KNOWN: Final = UNSUPPORTED | {
    *("type", "const", "enum", "format", "pattern", "nullable", "required", "$ref", "multipleOf", *IN_PLACE),
    *("items", "prefixItems", "additionalItems", "additionalProperties", "$dynamicAnchor", "$recursiveAnchor"),
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", *BY_NAME, *LOW, *HIGH),
    *("$anchor", "$schema", "$id", "id", "$comment", "title", "description", "default", "examples"),
    *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "x-guidance"),  # the last is refused later
}
COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
NUMERIC: Final = ("number", "integer")
LOOK_AROUND: Final = re.compile(r"\(\?(?:[=!]|<[=!])")
#: The beginning of the patterns that pydantic writes for a Decimal, and their ends.
_DECIMAL: Final = r"^(?!^[-+.]*$)[+-]?0*"
_DECIMAL_ENDS: Final = (
    re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<decimals>\d+)\}0\*)\$"),
    re.compile(r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=.{1,30}0\*\$\)\\d\{0,\d+\}\\\.\\d\{0,(?P<decimals>\d+)\}0\*\$\)"),
    re.compile(r"\(\?:\\d\{0,(?P<digits>\d+)\}\|\(\?=.{1,30}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"),
)
#: Other generators' patterns with look-around -> a part of what they allow, without.
_REWRITTEN: Final = {  # zod's email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    )
}
#: The keywords of a schema in which there is nothing to bound, close or leave out, with these types.
LEAF: Final = frozenset({"type", "const", "enum", "minLength", "maxLength", "title", "description", "default"})
#: The keywords of a schema with no others within.
PLAIN: Final = LEAF | {"format", "pattern", "minItems", "maxItems", "multipleOf", *LOW, *HIGH}
_LEAF_TYPES: Final = frozenset({"string", "boolean", "null"})


# ---- numbers


def limit_numbers(rewritten: dict[str, Any], *, wide: bool = False, stepped: bool = False) -> dict[str, Any]:
    """Bound the digits of a schema's numbers where it does not. Returns it. `wide`, `stepped`: other schemas in its
    place say that numbers may be larger, or that they are multiples."""
    integer = may_be(rewritten, "integer") and not may_be(rewritten, "number")
    lowest, highest = _INTEGERS if integer else _NUMBERS
    low = max((rewritten[name] for name in LOW if is_number(rewritten.get(name))), default=None)
    high = min((rewritten[name] for name in HIGH if is_number(rewritten.get(name))), default=None)
    if low is None:
        least = lowest if wide else -MOST
        low = rewritten["minimum"] = least if high is None or high > least else max(lowest, math.floor(high) * 1000)
    if high is None:
        most = highest if wide else MOST
        high = rewritten["maximum"] = most if low < most else min(highest, math.ceil(low) * 1000)
    if not integer and not stepped and "multipleOf" not in rewritten and high - low > STEP * _FEWEST:
        rewritten["multipleOf"] = STEP
    return rewritten


def clamp_bounds(rewritten: dict[str, Any]) -> None:
    """Bring bounds within those that llguidance reads."""
    integer = may_be(rewritten, "integer") and not may_be(rewritten, "number")
    lowest, highest = _INTEGERS if integer else _NUMBERS
    for name in (*LOW, *HIGH):
        if is_number(rewritten.get(name)):
            rewritten[name] = min(max(rewritten[name], lowest), highest)


def are_names(value: Any) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- patterns and names


def without_look_around(pattern: str) -> str | None:
    """A pattern that allows a part of what this one does, without look-around; None if it is not known."""
    if not pattern.startswith(_DECIMAL):
        return _REWRITTEN.get(pattern)
    for end in _DECIMAL_ENDS:
        if match := end.fullmatch(pattern.removeprefix(_DECIMAL)):
            count = {name: min(int(digits), 40) for name, digits in match.groupdict().items() if digits is not None}
            if "digits" not in count:
                return _decimal(count.get("whole", DIGITS), count.get("decimals", DECIMALS))
            digits = count["digits"]
            # Each number of decimals leaves the rest of the digits.
            return f"^({'|'.join(_decimal(digits - some, some)[1:-1] for some in range(digits + 1))})$"
    return None


def _decimal(whole: int, decimals: int) -> str:
    digits = "0" if whole == 0 else f"(0|[1-9][0-9]{{0,{whole - 1}}})"
    return f"^-?{digits}(\\.[0-9]{{1,{decimals}}})?$" if decimals else f"^-?{digits}$"


def name_members(rewritten: dict[str, Any]) -> None:
    """Say which names members may have (`propertyNames`) in the way that llguidance knows."""
    names = rewritten.get("propertyNames")
    if not isinstance(names, dict) or rewritten.keys() & {"properties", "patternProperties"}:
        return
    keys = names.keys() - ANNOTATIONS - {"type"}
    members = rewritten.get("additionalProperties", True)
    if names.get("type", "string") != "string":
        return
    if keys == {"enum"} and isinstance(names["enum"], list) and all(isinstance(name, str) for name in names["enum"]):
        rewritten["properties"] = dict.fromkeys(names["enum"], members)
    elif keys == {"pattern"} and isinstance(names["pattern"], str) and not LOOK_AROUND.search(names["pattern"]):
        rewritten["patternProperties"] = {names["pattern"]: members}
    else:
        return
    rewritten["additionalProperties"] = False
    del rewritten["propertyNames"]


def says_nothing(name: str, value: Any, rewritten: Mapping[str, Any]) -> bool:
    """Whether a keyword of UNSUPPORTED allows all, or is followed in another way."""
    match name:
        case "not" | "uniqueItems":
            return value is False
        case "if":
            return "then" not in rewritten and "else" not in rewritten
        case "then" | "else":
            return "if" not in rewritten
        case "minContains" | "maxContains":
            return "contains" not in rewritten
        case "contains":
            return rewritten.get("minContains") == 0 and "maxContains" not in rewritten
        case "propertyNames":
            return value is True or value in ({}, {"type": "string"})
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or bool(value == {})
        case _:
            return bool(value == {})


# ---- schemas


def schemas_of(root: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema, itself first, but for those in values."""
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += (value for name, value in node.items() if name not in ("const", "enum", "default", "examples"))
        elif isinstance(node, list):
            todo += node


def is_leaf_type(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return isinstance(kind, str) and kind in _LEAF_TYPES


def has_address(schema: Mapping[str, Any]) -> bool:
    name = schema.get("id")
    return isinstance(schema.get("$id"), str) or (isinstance(name, str) and "://" in name[:20])


def is_reference(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is a reference and nothing else."""
    return isinstance(schema.get("$ref"), str) and schema.keys() <= ANNOTATIONS | DEFINITIONS | {"$ref"}


def may_be(schema: Mapping[str, Any], kind: str, default: bool = False) -> bool:
    """Whether a schema names this type. `default`: if it names none."""
    kinds = schema.get("type")
    return kind == kinds or (isinstance(kinds, list) and kind in kinds) or (kinds is None and default)


def has_others(schema: Mapping[str, Any]) -> bool:
    """Whether other schemas hold in its place."""
    return "$ref" in schema or any(name in schema for name in IN_PLACE)


def intersects(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas hold in its place, beyond alternatives."""
    parts = schema.get("allOf")
    if "patternProperties" in schema or (isinstance(parts, list) and len(parts) > 1):
        return True
    keys = schema.keys() - ANNOTATIONS - DEFINITIONS
    return len(keys) > 1 and has_others(schema)


def only_alternatives(schema: Mapping[str, Any]) -> bool:
    """Whether a schema is a group of alternatives and nothing else."""
    return len(schema.keys() - ANNOTATIONS - DEFINITIONS) == 1 and any(name in schema for name in ALTERNATIVES)


def values_of(schema: Any) -> set[Any] | None:
    """The texts that a schema allows; None if it does not list them, or others."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {*values} if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def kinds_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema names, integers as numbers; None if it names none."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return None
    return {"number" if kind == "integer" else kind for kind in kinds}
