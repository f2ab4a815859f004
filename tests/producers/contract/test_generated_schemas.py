"""Schemas as generators write them: what is written by them is valid, and what is refused or left out is listed.

`generated_schemas.json` has what zod 4.6.7, zod-to-json-schema 3.25.2 and TypeBox 0.34.52 make, and, as examples, what
servers of MCP and documents of OpenAPI have. pydantic's are made here.
"""

from __future__ import annotations

import json
import random
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import jsonschema
import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, FilePath, RootModel, SecretStr

from engine.errors import RequestError
from engine.grammar.schema import bounded
from engine.grammar.source import form_of, new_rules

#: What cannot be followed, by the schema's name: left out of tools, refused elsewhere.
DROPPED: Final[dict[str, tuple[str, ...]]] = {
    "zod strings": ("properties.f.pattern",),  # look-ahead in the pattern of emoji
    "TypeBox date": ("properties.r.type", "properties.bi.type"),  # types of JavaScript alone
    "pydantic set": ("properties.names.uniqueItems",),
}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Tree(BaseModel):
    value: float
    children: list[Tree] = []


class Everything(BaseModel):
    name: str = Field(min_length=1, max_length=20)
    count: int
    ratio: Annotated[float, Field(gt=0, le=1)]
    large: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    price: Decimal
    exact: Annotated[Decimal, Field(max_digits=5, decimal_places=2)]
    when: datetime
    day: date
    hour: time
    span: timedelta
    key: uuid.UUID
    link: AnyUrl
    path: FilePath
    secret: SecretStr
    raw: bytes
    colour: Colour
    level: Level
    maybe: int | None = None
    pair: tuple[int, str]
    many: dict[str, float]
    few: dict[Literal["a", "b"], int]
    anything: Any
    nested: Tree
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Names(BaseModel):
    names: set[str]


PYDANTIC: Final[dict[str, type[BaseModel]]] = {
    "pydantic everything": Everything,
    "pydantic union": Dog,
    "pydantic recursive": Tree,
    "pydantic open": Open,
    "pydantic closed": Closed,
    "pydantic root": RootModel[list[Cat | int]],
    "pydantic set": Names,
}
SCHEMAS: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("generated_schemas.json").read_text()
) | {name: model.model_json_schema() for name, model in PYDANTIC.items()}


def drawn(schema: dict[str, Any], seed: int) -> str:
    """A random output of the schema's form, which closes what it has begun more often than not."""
    from llguidance import LLTokenizer

    draw, output = random.Random(seed), []
    rules = new_rules(form_of("json_schema", json.dumps(schema)), LLTokenizer("byte"))
    while not rules.is_stopped() and len(output) < 20_000:
        bits = int.from_bytes(rules.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        closing = [byte for byte in allowed if byte in b'"}]' and draw.random() < 0.5]
        token = draw.choice(closing or [byte for byte in allowed if byte not in b"\\ \n\r\t"] or allowed or [0])
        if not allowed or (rules.is_accepting() and draw.random() < 0.5):
            break
        rules.consume_token(token)
        output.append(token)
    assert rules.is_accepting(), bytes(output[-60:])
    return bytes(output).decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_only_what_is_listed_cannot_be_followed(name: str) -> None:
    assert bounded(SCHEMAS[name], drop=True).dropped == DROPPED.get(name, ())
    if name in DROPPED:
        with pytest.raises(RequestError):
            drawn(bounded(SCHEMAS[name]).schema, 0)


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - DROPPED.keys()))
def test_what_is_written_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    written = json.dumps(schema)
    older = '"items": [' in written
    validator = (jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator)(schema)
    for seed in range(4):
        text = drawn(bounded(schema).schema, seed)
        value = json.loads(text, parse_float=Decimal)
        if not any(word in written for word in ('"nullable": true', '"exclusiveMinimum": true')):  # OpenAPI's
            validator.validate(json.loads(text))
        assert all(len(str(abs(int(number)))) <= 19 for number in numbers(value))


def numbers(value: Any) -> list[Any]:
    """All numbers in a value."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [value] if isinstance(value, int | Decimal) and not isinstance(value, bool) else []
