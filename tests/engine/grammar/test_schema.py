"""Schemas of callers become schemas whose outputs end: numbers bounded, objects closed, annotations apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.grammar.child import judged
from engine.grammar.keywords import DECIMALS, DIGITS, KNOWN, without_look_around
from engine.grammar.schema import VERSION, Bounded, Budget, bounded, rules_of
from engine.grammar.source import form_of, new_rules
from engine.grammar.trial import light

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
Y = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}
DEFINED = {"$defs": {"X": X}}


def accepts(schema: Any, text: str, *, bound: bool = True, **options: Any) -> bool:
    """Whether a text is an output that the schema's form allows. `bound`: by the rules here, else to the letter."""
    from llguidance import LLTokenizer

    followed = bounded(schema, **options).schema if bound else schema
    rules = new_rules(form_of("json_schema", json.dumps(followed)), LLTokenizer("byte"))
    tokens = list(text.encode())
    if rules.validate_tokens(tokens) < len(tokens):
        return False
    rules.consume_tokens(tokens)
    return bool(rules.is_accepting())


def valid(text: str, schema: Any) -> None:
    import jsonschema  # a machine with a GPU, which collects this file, has no such package

    jsonschema.validate(json.loads(text), schema)


ONES, NINES = "1" * (DIGITS + 1), "9" * DIGITS


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        ({"type": "number"}, "{}"),
        ({"type": "integer"}, "{}"),
        ({"type": ["number", "null"]}, "{}"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "{}"),
        ({"type": "number", "minimum": 0}, "{}"),
        ({"type": "integer", "exclusiveMinimum": 0}, "{}"),
        ({"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}, '{{"n":{}}}'),
        ({"type": "array", "items": {"type": "integer"}}, "[{}]"),
        ({"type": "array"}, "[{}]"),
        ({"type": "array", "prefixItems": [{"type": "number"}]}, "[{}]"),
        ({"type": "object"}, '{{"k":[{}]}}'),
        ({"type": "object", "additionalProperties": True}, '{{"k":{}}}'),
        ({"type": "object", "patternProperties": {"^k": {"type": "number"}}}, '{{"k":{}}}'),
        ({"type": "object", "properties": {"n": {}}}, '{{"n":{{"m":{}}}}}'),
        ({}, '[{{"k":{}}}]'),
        ({"minimum": 5}, "{}"),
        ({"allOf": [{"type": "number"}, {"minimum": 5}]}, "{}"),
        ({"$ref": "#/$defs/N", "minimum": 5, "$defs": {"N": {"type": "number"}}}, "{}"),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"type": "integer"}}}, "{}"),
    ],
)
def test_a_number_ends(schema: dict[str, Any], around: str) -> None:
    assert accepts(schema, around.format(ONES), bound=False), "it has no end of its own"
    assert accepts(schema, around.format(NINES))
    assert not accepts(schema, around.format(ONES))


def test_a_number_has_some_decimals_and_no_exponent() -> None:
    number = {"type": "number"}
    assert accepts(number, "-1." + "1" * DECIMALS)
    assert not accepts(number, "-1." + "1" * (DECIMALS + 1))
    assert not accepts(number, "0." + "0" * (DECIMALS + 1))
    assert not accepts(number, "1e5")


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        ({"allOf": [{"type": "object"}, {"minProperties": 0}]}, '{{"k":{}}}'),
        ({"allOf": [{"type": "array"}, {"minItems": 1}]}, "[[{}]]"),
        ({"$ref": "#/$defs/A", "minItems": 1, "$defs": {"A": {"allOf": [{"type": "array"}]}}}, "[{}]"),
        ({"allOf": [{"type": "number"}, {"minimum": 10**16}]}, "{}"),
    ],
)
def test_what_schemas_combine_has_no_exponents_either(schema: dict[str, Any], around: str) -> None:
    huge = str(10**16)
    assert accepts(schema, around.format(huge[:15] if "minimum" not in str(schema) else huge))
    assert not accepts(schema, around.format("1e5"))
    assert not accepts(schema, around.format(huge + "." + "1" * (DECIMALS + 1)))


def test_multiples_that_schemas_combine_end() -> None:
    schema = {"allOf": [{"type": "number", "multipleOf": 3}, {"type": "number", "multipleOf": 2}]}
    assert accepts(schema, "12")
    assert not accepts(schema, "6" + "0" * 40)


def test_bounds_that_are_close_have_decimals_that_end() -> None:
    close = {"type": "number", "minimum": 5, "maximum": 5.00000001}
    assert accepts(close, "5.000000005")
    assert not accepts(close, "5." + "0" * 60)


def test_a_schema_may_have_larger_or_finer_numbers() -> None:
    assert accepts({"type": "integer", "maximum": 10**17}, "1" + "0" * 17)
    assert accepts({"type": "number", "minimum": -(10**17)}, "-1" + "0" * 17)
    assert accepts({"type": "integer", "minimum": 10**17}, "1" * 19)
    assert not accepts({"type": "integer", "minimum": 10**17}, "1" * 20)
    assert accepts({"type": "number", "multipleOf": 0.01}, "9.99")
    assert not accepts({"type": "number", "multipleOf": 0.01}, "9.999")
    assert accepts({"const": 10**16}, "1" + "0" * 16)
    assert accepts({"enum": [1e-12]}, "0.000000000001")
    assert accepts({"allOf": [{"type": "integer"}, {"multipleOf": 3}]}, "9")
    assert not accepts({"allOf": [{"type": "integer"}, {"multipleOf": 3}]}, "8")


@pytest.mark.parametrize(
    ("low", "high", "value"),
    [
        (-(2**63), 2**63 - 1, 2**63 - 1),
        (-(2**63), 2**63 - 1, -(2**63) + 1024),
        (0, 2**64 - 1, 2**63 - 1),
        (-(2**63), None, 5),
        (None, 2**63 - 1, -5),
    ],
)
def test_bounds_of_64_bits_work(low: int | None, high: int | None, value: int) -> None:
    bounds = {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    assert accepts({"type": "integer", **bounds}, str(value))


@pytest.mark.parametrize("most", [3.4028234663852886e38, 1.7976931348623157e308, 10**400])
def test_bounds_of_floats_work(most: float) -> None:
    assert accepts({"type": "number", "minimum": -most, "maximum": most}, "-2.5")


@pytest.mark.parametrize("name", ["path", "password", "binary", "byte", "int64", "iri", "regex", "made-up", 7])
def test_a_format_that_is_not_known_only_describes(name: Any) -> None:
    assert accepts({"type": "string", "format": name}, '"x"')
    assert not accepts({"type": "string", "format": "ipv4"}, '"x"')


@pytest.mark.parametrize(
    ("name", "longest", "endless"),
    [
        ("date-time", "2026-11-29T18:46:11.123456789+00:00", "2026-11-29T18:46:11.1234567890+00:00"),
        ("time", "18:46:11.123456789+00:00", "18:46:11.1234567890+00:00"),
        ("duration", "P1234567Y12M12DT123H123M12345S", f"P{'1' * 40}D"),
    ],
)
def test_a_format_whose_digits_have_no_end_is_bounded(name: str, longest: str, endless: str) -> None:
    """A model wrote zeros behind the seconds, up to its limit."""
    schema = {"type": ["string", "null"], "format": name}
    assert accepts(schema, f'"{longest}"')
    assert accepts(schema, f'"{endless}"', bound=False), "it has no end of its own"
    assert not accepts(schema, f'"{endless}"')
    assert accepts(schema | {"maxLength": 99}, f'"{endless}"')


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        ({"type": "object", "properties": {"a": {}}}, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"b":1}']),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, ['{"a":1,"b":[2]}', '{"b":1}'], ["{}"]),
        ({"properties": {"a": {}}}, ['{"a":1}', "5"], ['{"b":1}']),
        ({"allOf": [X, Y]}, ['{"x":1,"y":1}'], ['{"x":1}', '{"x":1,"y":1,"z":1}']),
        ({"allOf": [{"$ref": "#/$defs/X"}, Y], **DEFINED}, ['{"x":1,"y":1}'], ['{"x":1,"y":1,"z":1}']),
        ({"$ref": "#/$defs/X", "properties": {"y": {}}, **DEFINED}, ['{"x":1,"y":1}'], ['{"x":1,"z":1}']),
        ({"$ref": "#/$defs/X", **DEFINED}, ['{"x":1}'], ['{"x":1,"z":1}']),
        ({"anyOf": [{"$ref": "#/$defs/X"}, Y], **DEFINED}, ['{"x":1}', '{"y":1}'], ['{"x":1,"y":1}', '{"y":1,"z":1}']),
        (
            {"type": "object", "properties": {"k": {"const": 1}}, "anyOf": [{"$ref": "#/$defs/X"}, Y], **DEFINED},
            ['{"k":1,"x":1}', '{"k":1,"y":1}'],
            ['{"k":1}', '{"k":1,"x":1,"y":1}', '{"x":1,"z":1}'],
        ),
        (
            {**X, "properties": {"x": {}, "y": {}}, "anyOf": [{"required": ["y"]}, {"required": ["x"]}]},
            ['{"x":1,"y":1}', '{"x":1}'],
            ['{"x":1,"z":1}'],
        ),
        ({**X, "unevaluatedProperties": False, "allOf": [Y]}, ['{"x":1,"y":1}'], ['{"x":1,"y":1,"z":1}']),
        (
            {**X, "unevaluatedProperties": {"type": "boolean"}},
            ['{"x":1}', '{"x":1,"z":true}'],
            ['{"x":1,"z":1}', '{"x":true}'],
        ),
        ({"items": X, "type": "array"}, ['[{"x":1}]'], ['[{"x":1,"z":1}]']),
        (
            {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#"}}}},
            ['{"of":[{"of":[]},{}]}'],
            ['{"of":[{"z":1}]}'],
        ),
    ],
)
def test_an_object_whose_properties_are_listed_is_closed(
    schema: dict[str, Any], fine: list[str], wrong: list[str]
) -> None:
    for text in fine:
        valid(text, schema)
        assert accepts(schema, text), text
    assert not any(accepts(schema, text) for text in wrong)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"z":1}'),
        ({}, '{"z":1}'),
        ({**X, "additionalProperties": True}, '{"x":1,"z":1}'),
        ({**X, "additionalProperties": {"type": "boolean"}}, '{"x":1,"z":true}'),
        ({**X, "patternProperties": {"^z": {}}}, '{"x":1,"z":1}'),
        ({"allOf": [X, {"type": "object", "additionalProperties": True}]}, '{"x":1,"z":1}'),
        ({**X, "unevaluatedProperties": True}, '{"x":1,"z":1}'),
    ],
)
def test_another_object_stays_open(schema: dict[str, Any], text: str) -> None:
    assert accepts(schema, text)


def test_all_objects_may_be_opened() -> None:
    inner = {"type": "object", "properties": {"in": X}}
    assert accepts(inner, '{"in":{"x":1,"z":1},"z":1}', open_objects=True)
    assert not accepts(inner, '{"z":' + ONES + "}", open_objects=True), "numbers still end"
    assert not accepts({**X, "additionalProperties": False}, '{"x":1,"z":1}', open_objects=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [X, Y], "unevaluatedProperties": False},
        {"type": "object", "properties": {"x": {"type": "integer"}}, "anyOf": [Y, X], "unevaluatedProperties": False},
        {"anyOf": [{"$ref": "#/$defs/X"}, Y], "unevaluatedProperties": False, **DEFINED},
        {"anyOf": [{"anyOf": [X, {"$ref": "#/$defs/X"}]}, Y], "unevaluatedProperties": False, **DEFINED},
    ],
)
def test_what_a_schema_forbids_stays_closed_where_all_objects_are_open(schema: dict[str, Any]) -> None:
    assert accepts(schema, '{"x":1}', open_objects=True)
    assert not accepts(schema, '{"x":1,"z":1}', open_objects=True)
    inner = {"type": "object", "properties": {"in": {**X, "$defs": {}}}, "anyOf": [{"required": ["in"]}]}
    assert accepts({**inner, "unevaluatedProperties": False}, '{"in":{"x":1,"z":1}}', open_objects=True), "but inside"


def test_what_the_rules_have_made_they_leave() -> None:
    made = bounded({"type": "object", "properties": {"n": {"type": "number"}}}).schema
    assert rules_of(made) == VERSION
    assert bounded(made, open_objects=True) == Bounded(made)
    letter = {"type": "number", "$comment": "penstock:0"}
    assert bounded(letter) == Bounded(letter)
    assert accepts(letter, ONES + "e5")
    for other in ("penstock:", "penstock:x", "a comment", 5):
        assert rules_of(bounded({"$comment": other}).schema) == VERSION


def test_what_generators_write_is_read() -> None:
    assert accepts({"type": "string", "nullable": True}, "null")
    assert accepts({"$ref": "#/$defs/X", "nullable": True, **DEFINED}, "null")
    assert accepts({"type": "string", "enum": ["a"], "nullable": True}, "null")
    assert not accepts({"type": "string", "nullable": False}, "null")
    names = {"type": "object", "additionalProperties": {"type": "number"}}
    assert accepts({**names, "propertyNames": {"type": "string"}}, '{"k":1}')
    assert accepts({**names, "propertyNames": {"enum": ["k"]}}, '{"k":1}')
    assert not accepts({**names, "propertyNames": {"enum": ["k"]}}, '{"l":1}')
    assert not accepts({**names, "propertyNames": {"pattern": "^k"}}, '{"l":1}')
    assert accepts({"type": "array", "uniqueItems": False, "items": {"not": False}}, "[1]")


def test_alternatives_that_a_property_tells_apart_are_read() -> None:
    """Also where it has a default, and so is not required: pydantic's unions."""
    one = {"type": "object", "properties": {"t": {"const": "a", "default": "a"}, "v": {"type": "integer"}}}
    many = {"type": "object", "properties": {"t": {"const": "b"}, "of": {"type": "array", "items": {"$ref": "#"}}}}
    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": one, "B": many}}
    text = '{"t":"b","of":[{"t":"a","v":1}]}'
    valid(text, union)
    assert accepts(union, text)
    assert not accepts(union, "{}"), "it would be both"
    assert accepts({"oneOf": [{"const": "a"}, {"const": "b", "title": "B"}]}, '"b"')


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"


@pytest.mark.parametrize(
    ("pattern", "fine", "wrong"),
    [
        (r"\d*\.?\d*$", ["12.5", "0", "-3"], ["", ".", "1" * (DIGITS + 1)]),
        (r"\d*\.?\d{0,2}0*$", ["12.55"], ["12.555"]),
        (r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)", ["125.55", "1"], ["1255", "1.555"]),
        (r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)", ["12345", "12.345", "0.12345"], ["123456", "12.3456"]),
        (r"(?:\d{0,0}|(?=[\d.]{1,4}0*$)\d{0,0}\.\d{0,3}0*$)", ["0.123"], ["1", "0.1234"]),
    ],
)
def test_the_patterns_of_a_decimal_are_read(pattern: str, fine: list[str], wrong: list[str]) -> None:
    import re

    schema = {"type": "string", "pattern": DECIMAL + pattern}
    for text in fine:
        assert re.search(schema["pattern"], text), text
        assert accepts(schema, json.dumps(text)), text
    assert not any(accepts(schema, json.dumps(text)) for text in wrong)


def test_a_pattern_of_another_look_around_is_refused_or_left_out() -> None:
    other = {"type": "string", "pattern": "^(?=a)a$"}
    assert without_look_around("^(?=a)a$") is None
    with pytest.raises(RequestError, match="look-around"):
        accepts(other, '"a"')
    assert bounded(other, drop=True).dropped == ("pattern",)
    assert accepts(other, '"b"', drop=True)


@pytest.mark.parametrize(
    ("odd", "dropped"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "any"}, "type"),
        ({"required": True}, "required"),
        ({"$ref": "https://example.org/a.json"}, "$ref"),
        ({"oneOf": [{}, {"minimum": 1}]}, "oneOf"),
        ({"type": "object", "properties": {"b": {}}, "minProperties": 2}, "minProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ],
)
def test_only_what_cannot_be_followed_is_left_out(odd: dict[str, Any], dropped: str) -> None:
    schema = {"type": "object", "properties": {"a": odd, "n": {"type": "integer"}}, "required": ["n"]}
    with pytest.raises(RequestError, match="json_schema cannot be followed"):
        accepts(schema, '{"n":1}')
    made = bounded(schema, drop=True)
    assert f"properties.a.{dropped}" in made.dropped
    assert accepts(schema, '{"n":1}', drop=True)
    assert not accepts(schema, '{"n":true}', drop=True)


def test_large_and_deep_schemas_are_read_soon_or_left() -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"items": deep}
    assert bounded(deep) == Bounded(deep)
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1700)} | {"a1700": {"const": 7}}
    assert accepts({"$ref": "#/$defs/a0", "$defs": chain}, "7")
    ring = {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}, X]}}}
    assert rules_of(bounded(ring).schema) == VERSION
    wide: dict[str, Any] = {f"p{i}": {} for i in range(900)}
    crossed = {"properties": wide, "anyOf": [{"anyOf": [X] * 30}] * 30}
    assert bounded(crossed) == Bounded(crossed), "the names, times the alternatives"


def test_a_required_name_that_a_schema_forbids_is_not_allowed() -> None:
    schema = {"type": "object", "properties": {}, "required": ["b"], "unevaluatedProperties": False}
    with pytest.raises(RequestError):
        accepts(schema, '{"b":72}')


OPEN: dict[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"allOf": [{"properties": {"b": OPEN}}, {"properties": {"b": OPEN}}]}, '{"b":{"k":[%s]}}'),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"b": {}}}]}, '{"b":[{"k":%s}]}'),
        ({"allOf": [OPEN | {"additionalProperties": True}] * 2}, '{"k":%s}'),
        (
            OPEN | {"properties": {"m": OPEN}, "anyOf": [{"required": ["m"]}, {"properties": {"m": OPEN}}]},
            '{"m":{"k":{"l":%s}}}',
        ),
        ({"allOf": [{"type": "array"}, {"type": "array", "items": {}}]}, "[[%s]]"),
        ({"type": "object", "properties": {"k": {}}, "patternProperties": {"^k": {}}}, '{"k":[%s]}'),
    ],
)
def test_any_json_may_stand_twice_in_one_place(schema: dict[str, Any], text: str) -> None:
    assert accepts(schema, text % "7")
    assert not accepts(schema, text % ONES)


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/components/schemas/A"}},
                "components": {"schemas": {"A": {"type": "string"}}},
            },
            '{"a":"x"}',
            '{"a":1}',
        ),
        (
            {
                "type": "object",
                "properties": {
                    "a": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                    "b": {"$ref": "#/properties/a/oneOf/1"},
                },
            },
            '{"b":1}',
            '{"b":"x"}',
        ),
        (
            {
                "$ref": "#/definitions/a",
                "definitions": {
                    "a": {
                        "nullable": True,
                        "properties": {"q": {"type": "string"}, "r": {"$ref": "#/definitions/a/properties/q"}},
                    }
                },
            },
            '{"r":"x"}',
            '{"r":1}',
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/x/T"}},
                "x": {
                    "T": {"type": "object", "properties": {"t": {"$ref": "#/x/T"}, "n": {"$ref": "#/x/N"}}},
                    "N": {"type": "number"},
                },
            },
            '{"a":{"t":{"n":5}}}',
            '{"a":{"t":{"n":"5"}}}',
        ),
        ({"allOf": [{"$ref": "#/x/S"}, {"minLength": 2}], "x": {"S": {"type": "string"}}}, '"ab"', '"a"'),
    ],
)
def test_a_reference_may_lead_to_any_place(schema: dict[str, Any], fine: str, wrong: str) -> None:
    assert accepts(schema, fine)
    assert not accepts(schema, wrong)


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**400, "", "x", "#", "#/a/0", "a|(?=b)"),
    *([], [[]], [{}], [1, None, True], ["x", []], ["string", {}], {}, {"a": []}, {"type": {}}, {"enum": [{}]}),
)


@pytest.mark.parametrize("keyword", sorted({*KNOWN, "$defs", "example", "unknown"}))
def test_a_value_of_another_type_breaks_nothing(keyword: str) -> None:
    for value in JUNK:
        for others in ({"nullable": True}, {"allOf": [X, Y]}, X, {"type": ["number", "null"], "oneOf": [X, Y]}):
            odd = others | {keyword: value}
            for schema, drop in ((odd, True), ({"properties": {"a": odd}, "oneOf": [odd, X]}, False)):
                assert rules_of(bounded(schema, drop=drop).schema) == VERSION, schema


def test_a_number_that_is_none_leaves_a_schema_as_it_is() -> None:
    none = {"type": "number", "maximum": float("nan")}
    assert bounded(none).schema.keys() == none.keys()


NAMES = {f"n{at}": {"const": ""} for at in range(200)}
#: Schemas in which few characters say that much is to be looked at.
HEAVY: dict[str, dict[str, Any]] = {
    "alternatives by parts by names": {
        "oneOf": [{"$ref": "#/a"}] * 99 + [{"$ref": "#/c"}],
        "a": {"allOf": [{"$ref": "#/b"}] * 100},
        "b": {"properties": NAMES},
        "c": {"properties": NAMES},
    },
    "parts of alternatives": {
        "oneOf": [{"allOf": [{"$ref": "#/b"}] * 9} for _ in range(20)],
        "b": {"properties": NAMES},
    },
    "chains of references": {
        "oneOf": [{"$ref": f"#/c{at}/0"} for at in range(2)] * 40,
        **{f"c{at}": [{"$ref": f"#/c{at}/{to}"} for to in range(1, 100)] + [{}] for at in range(2)},
    },
    "texts by alternatives": {
        "anyOf": [{"oneOf": [{"$ref": "#/e"}, {"const": "-"}]}] * 30,
        "e": {"enum": [str(at) for at in range(1500)]},
    },
    "keywords by references": {"anyOf": [{"anyOf": [{"$ref": "#/k"}]}] * 20, "k": {f"x{at}": 1 for at in range(900)}},
    "names required": {
        "anyOf": [{"anyOf": [{"$ref": "#/k"}]}] * 20,
        "k": {"required": [f"x{at}" for at in range(900)]},
    },
    "members by names": {
        "type": "object",
        "propertyNames": {"enum": [f"x{at}" for at in range(200)]},
        "additionalProperties": {"properties": {f"x{at}": {"type": "integer"} for at in range(99)}},
    },
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_short_schema_that_says_much_is_left(name: str) -> None:
    budget = Budget()
    assert bounded(HEAVY[name], budget=budget) == Bounded(HEAVY[name])
    assert budget.steps == 0


def test_alternatives_are_looked_at_once() -> None:
    kinds = [{"type": "object", "properties": {"t": {"const": str(at)}}, "required": ["t"]} for at in range(40)]
    schema = {
        "type": "object",
        "properties": {
            name: {"oneOf": [{"$ref": f"#/$defs/K{at}"} for at in range(len(kinds))]} for name in ("a", "b", "c")
        },
        "$defs": {f"K{at}": kind for at, kind in enumerate(kinds)},
    }
    assert accepts(schema, '{"a":{"t":"39"},"c":{"t":"0"}}')


def test_the_schemas_of_a_request_have_one_budget() -> None:
    schema = {"anyOf": [{"$ref": "#/$defs/A"}] * 50, "$defs": {"A": X}}
    budget = Budget()
    before = budget.steps
    assert rules_of(bounded(schema, budget=budget).schema) == VERSION
    taken = before - budget.steps
    assert taken > 0
    budget = Budget(2 * taken)
    assert all(rules_of(bounded(schema, budget=budget).schema) == VERSION for _ in range(2))
    assert bounded(schema, budget=budget) == Bounded(schema)
    assert rules_of(bounded(schema).schema) == VERSION, "another request's"


def test_a_bounded_schema_is_as_light_as_its_callers() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "m": {"type": ["number", "null"]}, "any": {}}}
    assert light("json_schema", json.dumps(bounded(schema).schema))
    judged(None)(["json_schema", json.dumps(bounded(schema).schema)])
