"""JSON schemas whose outputs end: bounded numbers, closed objects, and what generators of schemas write. No llguidance.

a caller's schema ─▶ `bounded`: annotations apart, numbers and objects bounded ─▶ the schema that outputs follow

The new schema allows no output that the old one does not, but where a keyword is dropped, which `dropped` tells. It
names the version of these rules, and stands in the task's record: an output that was begun keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from engine.grammar.keywords import (
    ALTERNATIVES,
    ANNOTATIONS,
    BY_NAME,
    COUNTS,
    DEFINITIONS,
    FORMATS,
    HIGH,
    IN_PLACE,
    KNOWN,
    LEAF,
    LONGEST,
    LOOK_AROUND,
    LOW,
    MOST,
    NUMERIC,
    PLAIN,
    TYPES,
    UNSUPPORTED,
    are_names,
    clamp_bounds,
    has_address,
    has_others,
    intersects,
    is_leaf_type,
    is_number,
    is_reference,
    kinds_of,
    limit_numbers,
    may_be,
    name_members,
    only_alternatives,
    says_nothing,
    schemas_of,
    values_of,
    without_look_around,
)

#: The version of these rules. A schema with this as its `$comment` has been bounded, or is to be followed to the letter
#: (version 0).
VERSION: Final = 2
MARK: Final = "penstock:"
_NULL: Final = {"type": "null"}
#: The deepest schema that is read, in schemas within schemas: llguidance takes no deeper one. And the most steps of
#: looking at what holds in one place, for all schemas of a request. Beyond, a schema is left as it is.
_DEPTH: Final = 128
#: A step takes up to a microsecond: short requests are read on the gateway's event loop, larger ones on a thread.
_STEPS: Final = 20_000
#: The steps that each character of a schema gives it more.
_FREE: Final = 2
_ANY: Final = "penstock.any"
#: References to definitions, which stay where they are.
_DEFINED: Final = re.compile(r"#/(\$defs|definitions)/[^/]*")
#: The levels of lists and objects in which the numbers of any JSON are bounded, beside other schemas.
_LEVELS: Final = 2


@dataclass(frozen=True, slots=True)
class Bounded:
    """A schema whose outputs end. `dropped`: the keywords that it does not follow, each with its place, as text."""

    schema: dict[str, Any]
    dropped: tuple[str, ...] = ()


class _TooLarge(Exception):
    """The schema is too deep, or too much holds in one place."""


@dataclass(slots=True)
class Budget:
    """The steps that are left for the schemas of one request."""

    steps: int = _STEPS


def bounded(
    schema: Mapping[str, Any], *, open_objects: bool = False, drop: bool = False, budget: Budget | None = None
) -> Bounded:
    """The schema whose outputs end, of a caller's schema. `open_objects`: objects may have members that it does not
    name. `drop`: leave out what llguidance cannot follow; else that stays, and is refused later. `budget`: of the
    request, where it has several schemas; what this one takes is taken from it.

    A schema that these rules have made, of whatever version, is returned as it is, and so is one that is too deep or
    takes more steps than there are. The result may be another call's, too: do not change it.
    """
    if rules_of(schema) is not None:
        return Bounded(dict(schema))
    budget = Budget() if budget is None else budget
    try:
        rewritten, steps = _bounded(json.dumps(schema), open_objects, drop, budget.steps)
    except (RecursionError, ValueError):  # nor of an integer with more digits than Python writes
        return Bounded(dict(schema))
    budget.steps -= steps
    return rewritten or Bounded(dict(schema))


@lru_cache(maxsize=16)  # a task's is asked for when it is judged and when it is queued; a batch has many of one form
def _bounded(text: str, open_objects: bool, drop: bool, steps: int) -> tuple[Bounded | None, int]:
    """None for a schema that is too large for these rules or takes more than `steps`; and the steps that it took."""
    free = len(text) * _FREE
    rewriter = _Rewriter(json.loads(text), open_objects, drop, steps + free)
    try:
        rewritten = rewriter.whole()
    except (_TooLarge, RecursionError, TypeError, ValueError, ArithmeticError):  # odd values: llguidance refuses them
        rewritten = None
    steps = max(0, rewriter.steps_taken - free)
    return None if rewritten is None else Bounded(rewritten, tuple(rewriter.dropped)), steps


def rules_of(schema: Mapping[str, Any]) -> int | None:
    """The version of the rules by which a schema was made; None for one that they have not read."""
    comment = schema.get("$comment")
    if not isinstance(comment, str) or not comment.startswith(MARK):
        return None
    version = comment.removeprefix(MARK)
    return int(version) if version.isascii() and version.isdecimal() and len(version) < 5 else None


def to_the_letter(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with the mark of one that is followed as it is, whose outputs may not end."""
    return {**schema, "$comment": f"{MARK}0"}


@dataclass(slots=True)
class _Facts:
    """The constraints on a value at one place: those of a schema, and of all that it refers to or combines there.

    `names`: of the properties -> whether one of its schemas describes it; others are only required. `listed`: whether
    `properties` is given. `open`: whether something says which other properties there may be, or cannot be read.
    `kinds`: the types that are named. `items`: whether something says what lists may have. `stepped`: whether numbers
    are to be multiples. `wide`: whether they may be larger than by default.
    """

    names: dict[str, bool] = field(default_factory=dict)
    listed: bool = False
    open: bool = False
    kinds: set[str] = field(default_factory=set)
    items: bool = False
    stepped: bool = False
    wide: bool = False

    @property
    def numeric(self) -> bool:
        """Whether a number may be there."""
        return not self.kinds.isdisjoint(NUMERIC)


class _Rewriter:
    """Makes one schema's bounded one.

    A schema that stands by itself as a value is closed, and its numbers are bounded (`_value`). One that holds beside
    others in the same place is not (`_part`): it would forbid the others' properties.
    """

    def __init__(self, root: dict[str, Any], open_objects: bool, drop: bool, steps: int) -> None:
        self._root = root
        self._open = open_objects
        self._drop = drop
        self.dropped: list[str] = []
        #: Definitions of our own.
        self._made: dict[str, Any] = {}
        #: References, each as a part or not -> our definitions of their schemas; and those still to be made, by name.
        self._copies: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, Any, bool]] = []
        self._steps = steps
        self.steps_taken = 0
        everything = list(schemas_of(root))
        #: In a schema with an address of its own "#/..." leads elsewhere.
        self._one_document = not any(map(has_address, everything[1:]))
        self._addresses = {"", *(node["$id"] for node in everything if isinstance(node.get("$id"), str))}
        self._intersects = any(map(intersects, everything))
        #: Properties that tell the alternatives of a `oneOf` apart, by the id of the object of properties.
        self._telling: dict[int, str] = {}
        #: By the id of a schema: the texts that it lists, and those of its properties.
        self._values: dict[int, set[Any] | None] = {}
        self._texts_by_schema: dict[int, dict[str, tuple[set[Any], dict[str, Any]]]] = {}
        #: The ids of lists of alternatives of which no value is of two.
        self._apart: set[int] = set()
        self._unions = [node["oneOf"] for node in everything if isinstance(node.get("oneOf"), list)]

    def whole(self) -> dict[str, Any]:
        for union in self._unions:
            self._tell_apart(union)
        rewritten: dict[str, Any] = self._value(self._root, ())
        while self._waiting:
            name, schema, part = self._waiting.pop()
            make = self._part if part else self._value
            self._made[name] = make(schema, (f"$defs.{name}",))
        if self._made:
            existing = rewritten.get("$defs", {})
            rewritten = rewritten | {"$defs": {**(existing if isinstance(existing, dict) else {}), **self._made}}
        return rewritten | {"$comment": f"{MARK}{VERSION}"}

    # ---- one place

    def _value(self, schema: Any, path: tuple[str, ...]) -> Any:
        """A schema that stands by itself."""
        self._count(2)
        if not self._one_document or not isinstance(schema, dict | bool) or schema is False:
            return self._node(schema, path, {})
        if schema is True or schema.keys() <= ANNOTATIONS:
            return self._anything()
        kind = schema.get("type")
        if kind in NUMERIC and schema.keys() - ANNOTATIONS == {"type"}:
            self._made.setdefault(f"penstock.{kind}", limit_numbers({"type": kind}))
            return {"$ref": f"#/$defs/penstock.{kind}"}
        return self._node(schema, path, {})

    def _part(
        self, schema: Any, path: tuple[str, ...], outer: Mapping[str, bool] | None = None, forced: bool = False
    ) -> Any:
        """A schema that holds beside others. With `outer` it is closed, for all the properties of its place; `forced`:
        also where objects stay open, since another schema of the place forbids further properties."""
        return self._node(schema, path, outer, part=True, forced=forced)

    def _node(
        self,
        schema: Any,
        path: tuple[str, ...],
        outer: Mapping[str, bool] | None,
        part: bool = False,
        forced: bool = False,
    ) -> Any:
        if len(path) > _DEPTH:
            raise _TooLarge
        self._count(4)
        if not isinstance(schema, dict) or (is_leaf_type(schema) and schema.keys() <= LEAF):
            return schema
        self._count(20)
        if schema.get("nullable") is True and "type" not in schema:
            value = {name: part for name, part in schema.items() if name not in DEFINITIONS | {"nullable"}}
            schema = {"anyOf": [value, _NULL]} | {name: schema[name] for name in DEFINITIONS & schema.keys()}
        rewritten = self._keywords(schema, path)
        if rewritten.keys() <= PLAIN:
            if not part:
                self._fill(rewritten, _Facts())
            return rewritten
        facts = self._facts(schema)
        for name in BY_NAME:
            if isinstance(schemas := rewritten.get(name), dict):
                rewritten[name] = {key: self._value(part, (*path, f"{name}.{key}")) for key, part in schemas.items()}
        for name in ("items", "prefixItems", "additionalItems", "additionalProperties"):
            inner = rewritten.get(name)
            if isinstance(inner, list):
                rewritten[name] = [self._value(part, (*path, f"{name}[{at}]")) for at, part in enumerate(inner)]
            elif name in rewritten:
                rewritten[name] = self._value(inner, (*path, name))
        if not part:
            self._fill(rewritten, facts)
        self._combine(schema, rewritten, facts, path, outer, forced)
        return rewritten

    def _fill(self, rewritten: dict[str, Any], facts: _Facts) -> None:
        """Bound what the schema of a value leaves open: its numbers, also those of its items and further members."""
        if {"const", "enum"} & rewritten.keys() or is_reference(rewritten):
            return
        combines = has_others(rewritten)
        if self._one_document and not (combines and only_alternatives(rewritten)):
            # Of a list whose beginning is described, the schema itself says so.
            lists = "array" in facts.kinds and not facts.items if combines else may_be(rewritten, "array")
            if lists and "items" not in rewritten:
                rewritten["items"] = self._anything()
            further = not facts.listed or (self._open and not combines)
            if further and not facts.open and ("object" in facts.kinds if combines else may_be(rewritten, "object")):
                rewritten["additionalProperties"] = self._anything()
        if combines:
            if facts.numeric and not only_alternatives(rewritten):
                limit_numbers(rewritten, wide=facts.wide, stepped=facts.stepped)
        elif "type" not in rewritten or any(may_be(rewritten, kind) for kind in NUMERIC):
            limit_numbers(rewritten)

    def _combine(
        self,
        schema: dict[str, Any],
        rewritten: dict[str, Any],
        facts: _Facts,
        path: tuple[str, ...],
        outer: Mapping[str, bool] | None,
        forced: bool,
    ) -> None:
        """Rewrite the schemas that hold beside this one (`allOf`, alternatives, references), and close the place:
        by its first group of alternatives, or by the schema itself."""
        self._count(len(outer or ()))
        forbids = schema.get("unevaluatedProperties") is False and self._forbid(rewritten, facts, path)
        groups = [name for name in ALTERNATIVES if isinstance(rewritten.get(name), list)]
        beside = self._facts(schema, but=groups[:1])
        names = {name: listed or (outer or {}).get(name, False) for name, listed in beside.names.items()}
        described: dict[str, bool] = {name: listed for name, listed in names.items() if listed}
        names = described if forbids else {**(outer or {}), **names}
        forced = forced or forbids
        closes = (forced or (outer is not None and not self._open)) and not beside.open
        if isinstance(rewritten.get("allOf"), list):
            rewritten["allOf"] = [
                self._part(part, (*path, f"allOf[{at}]")) for at, part in enumerate(rewritten["allOf"])
            ]
        for name in groups:
            inner = names if closes and name == groups[0] else None
            alone = outer == {} and only_alternatives(rewritten) and not (forced and self._open)
            rewritten[name] = [
                self._alternative(name, branch, (*path, f"{name}[{at}]"), inner, alone, forced)
                for at, branch in enumerate(rewritten[name])
            ]
        if is_reference(rewritten) and outer == {} and not forced:  # closed where it is defined
            rewritten["$ref"] = self._copied(rewritten["$ref"], part=False)
            return
        if isinstance(rewritten.get("$ref"), str):
            rewritten["$ref"] = self._reference(rewritten["$ref"])
        if (
            groups
            or not closes
            or not may_be(rewritten, "object", default=True)
            or {"const", "enum"} & rewritten.keys()
        ):
            return
        if not (beside.listed or outer or forced) or not isinstance(rewritten.get("properties", {}), dict):
            return
        self._count(len(names))
        properties = dict(rewritten.get("properties", {}))
        for name in names:
            if name not in properties:
                properties[name] = True if names[name] or not self._one_document else self._anything()
        rewritten |= {"properties": properties} if properties else {}
        rewritten["additionalProperties"] = False

    def _forbid(self, rewritten: dict[str, Any], facts: _Facts, path: tuple[str, ...]) -> bool:
        """Whether `unevaluatedProperties: false` can be followed, by closing the place to all but its own names."""
        if not facts.open or not has_others(rewritten):
            del rewritten["unevaluatedProperties"]
            if facts.open:
                rewritten.setdefault("additionalProperties", False)
            return True
        if self._drop:
            self._leave_out(rewritten, path, "unevaluatedProperties")
        return False

    def _alternative(
        self,
        group: str,
        schema: Any,
        path: tuple[str, ...],
        outer: Mapping[str, bool] | None,
        alone: bool,
        forced: bool,
    ) -> Any:
        if not alone:
            return self._part(schema, path, outer, forced)
        # llguidance tells those of `oneOf` apart by their types, which a reference hides.
        return self._value(schema, path) if group == "anyOf" else self._node(schema, path, {})

    def _reference(self, reference: str) -> str:
        """The reference to the same schema as a part."""
        target = self._resolve(reference)
        if isinstance(target, dict) and self._one_document:
            facts = self._facts(target)
            if facts.listed or facts.numeric:
                return self._copy(reference, target, part=True)
        return self._copied(reference, part=True)

    def _copied(self, reference: str, part: bool) -> str:
        """The reference; to a definition of our own, if it leads to where these rules may change what stands there."""
        if not self._one_document or reference == "#" or _DEFINED.fullmatch(reference):
            return reference
        target = self._resolve(reference)
        if not isinstance(target, dict | bool) or target is self._root:
            return reference
        return self._copy(reference, target, part)

    def _copy(self, reference: str, target: Any, part: bool) -> str:
        name = self._copies.get((reference, part))
        if name is None:
            name = self._copies[reference, part] = f"penstock.{'part' if part else 'value'}{len(self._copies)}"
            if isinstance(target, dict):
                target = {key: value for key, value in target.items() if key not in DEFINITIONS}
            self._waiting.append((name, target, part))
        return f"#/$defs/{name}"

    def _anything(self) -> dict[str, Any]:
        """Any JSON, with bounded numbers; where a place may have two of it, only to a depth, for llguidance does not
        find an end of intersecting two schemas that refer to themselves."""
        reference = {"$ref": f"#/$defs/{_ANY}"}
        if _ANY not in self._made:
            inner: Any = True if self._intersects else reference
            for level in range(_LEVELS if self._intersects else 0, 0, -1):
                self._made[f"{_ANY}{level}"] = limit_numbers({"items": inner, "additionalProperties": inner})
                inner = {"$ref": f"#/$defs/{_ANY}{level}"}
            self._made[_ANY] = limit_numbers({"items": inner, "additionalProperties": inner})
        return reference

    # ---- what holds in one place

    def _facts(self, schema: dict[str, Any], but: Sequence[str] = ()) -> _Facts:
        """`but`: keywords of the schema itself that are left out."""
        facts = _Facts()
        todo: list[Any] = [{name: value for name, value in schema.items() if name not in but}]
        references: set[str] = set()
        while todo:
            node = todo.pop()
            self._count(6)
            if not isinstance(node, dict):
                continue
            properties, required = node.get("properties"), node.get("required")
            required = required if isinstance(required, list) else []
            self._count(len(node) + len(required))
            for name in required:
                if isinstance(name, str):
                    facts.names.setdefault(name, False)
            if isinstance(properties, dict):
                facts.listed = True
                facts.names |= dict.fromkeys(properties, True)
                self._count(len(properties))
            facts.open |= bool(
                {"additionalProperties", "patternProperties", "const", "enum", "$dynamicRef"} & node.keys()
            )
            facts.open |= node.get("unevaluatedProperties", False) is not False or "propertyNames" in node
            kinds = node.get("type")
            kinds = [kinds] if isinstance(kinds, str) else kinds
            facts.kinds |= set(kinds) if isinstance(kinds, list) and are_names(kinds) else set()
            facts.items |= not {"items", "prefixItems", "additionalItems", "unevaluatedItems"}.isdisjoint(node)
            bounds = [node[name] for name in (*LOW, *HIGH) if is_number(node.get(name))]
            facts.stepped |= "multipleOf" in node
            facts.wide |= any(abs(bound) > MOST for bound in bounds)
            inner: list[Any] = []
            for name, value in node.items():  # in the order in which properties come
                if name in IN_PLACE and isinstance(value, list):
                    inner += value
                elif name in ("then", "else"):
                    inner.append(value)
                elif name == "$ref" and isinstance(value, str) and value not in references:
                    references.add(value)
                    inner.append(target := self._resolve(value))
                    facts.open |= not isinstance(target, dict | bool)
            todo += reversed(inner)
        return facts

    def _count(self, steps: int) -> None:
        if self.steps_taken + steps > self._steps:
            self.steps_taken = self._steps
            raise _TooLarge
        self.steps_taken += steps

    def _resolve(self, reference: str) -> Any:
        """The schema at a pointer into this one; None if there is none."""
        if reference == self._root.get("$id"):
            return self._root
        if reference != "#" and not reference.startswith("#/"):
            return None
        node: Any = self._root
        self._count(4 + len(reference) // 4)
        for part in reference[2:].split("/") if len(reference) > 1 else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif (
                isinstance(node, list)
                and name.isascii()
                and name.isdecimal()
                and len(name) < 6
                and int(name) < len(node)
            ):
                node = node[int(name)]
            else:
                return None
        return node

    def _tell_apart(self, alternatives: list[Any]) -> None:
        """Find out whether no value is of two alternatives: by types, by values, or by a property that each has with
        other values. Such a property becomes required, for without it a value may be of several."""
        branches = [self._target(alternative) for alternative in alternatives]
        if not all(isinstance(branch, dict) for branch in branches) or len({*map(id, branches)}) < len(branches):
            return
        values = [self._listed(branch) for branch in branches]
        types = [kinds_of(branch) for branch in branches]
        if self._disjoint(values) or self._disjoint(types):
            self._apart.add(id(alternatives))
            return
        texts_of = [self._texts(branch) for branch in branches]
        for name in texts_of[0] if texts_of else ():
            self._count(len(texts_of))
            each = [texts.get(name) for texts in texts_of]
            holders = [id(match[1]) for match in each if match is not None]
            free = all(self._telling.get(holder, name) == name for holder in holders)
            if free and self._disjoint([None if match is None else match[0] for match in each]):
                self._telling |= dict.fromkeys(holders, name)
                self._apart.add(id(alternatives))
                return

    def _texts(self, schema: dict[str, Any]) -> dict[str, tuple[set[Any], dict[str, Any]]]:
        """The properties of which a schema lists the texts, by name: the texts, and the properties that it is in."""
        if id(schema) in self._texts_by_schema:
            return self._texts_by_schema[id(schema)]
        texts: dict[str, tuple[set[Any], dict[str, Any]]] = {}
        self._texts_by_schema[id(schema)] = texts
        todo: list[Any] = [schema]
        for _ in range(_DEPTH):
            if not todo:
                break
            node = self._target(todo.pop())
            if isinstance(node, dict):
                properties = node.get("properties")
                properties = properties if isinstance(properties, dict) else {}
                self._count(4 * len(properties))
                for name, value in properties.items():
                    if (listed := self._listed(value)) is not None:
                        texts.setdefault(name, (listed, properties))
                parts = node["allOf"] if isinstance(node.get("allOf"), list) else []
                self._count(len(parts))
                todo += parts
        return texts

    def _listed(self, schema: Any) -> set[Any] | None:
        """`values_of`, found out once for each schema."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._values:
            self._values[id(schema)] = values_of(schema)
        return self._values[id(schema)]

    def _disjoint(self, sets: Sequence[set[Any] | None]) -> bool:
        value_sets = [values for values in sets if values is not None]
        if len(value_sets) < len(sets):
            return False
        self._count(size := sum(map(len, value_sets)))
        return size == len(set().union(*value_sets))

    def _target(self, schema: Any) -> Any:
        for _ in range(_DEPTH):
            self._count(3)
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._resolve(schema["$ref"])
        return schema

    # ---- keywords

    def _keywords(self, schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """The schema's keywords as llguidance has them."""
        rewritten = {name: value for name, value in schema.items() if name in KNOWN}
        if "format" in rewritten and not (isinstance(rewritten["format"], str) and rewritten["format"] in FORMATS):
            del rewritten["format"]
        if (longest := LONGEST.get(rewritten.get("format", ""))) and "minLength" not in rewritten:
            rewritten.setdefault("maxLength", longest)
        for name in COUNTS & rewritten.keys():  # JSON Schema's integers may be written as 2.0
            if isinstance(rewritten[name], float) and rewritten[name].is_integer():
                rewritten[name] = int(rewritten[name])
        if rewritten.pop("nullable", False) is True and isinstance(rewritten["type"], str | list):
            kinds = [rewritten["type"]] if isinstance(rewritten["type"], str) else list(rewritten["type"])
            rewritten["type"] = kinds if "null" in kinds else [*kinds, "null"]
            if isinstance(rewritten.get("enum"), list) and None not in rewritten["enum"]:
                rewritten["enum"] = [*rewritten["enum"], None]
        telling = self._telling.get(id(rewritten.get("properties")))
        if telling is not None and are_names(rewritten.get("required", [])):
            rewritten["required"] = list(dict.fromkeys([*rewritten.get("required", []), telling]))
        if isinstance(pattern := rewritten.get("pattern"), str) and LOOK_AROUND.search(pattern):
            plain = without_look_around(pattern)
            if plain is not None:
                rewritten["pattern"] = plain
            elif self._drop:
                self._leave_out(rewritten, path, "pattern")
        name_members(rewritten)
        if rewritten.get("unevaluatedItems") is False and not has_others(rewritten):
            rewritten.setdefault("items", False)
            del rewritten["unevaluatedItems"]
        further = rewritten.get("unevaluatedProperties")
        if isinstance(further, dict) and further and not has_others(rewritten):
            rewritten.setdefault("additionalProperties", further)
            del rewritten["unevaluatedProperties"]
        for name in sorted(UNSUPPORTED & rewritten.keys()):
            if says_nothing(name, rewritten[name], rewritten):
                del rewritten[name]
            elif self._drop and not (name == "unevaluatedProperties" and rewritten[name] is False):
                self._leave_out(rewritten, path, name)
        if id(schema.get("oneOf")) in self._apart and "anyOf" not in rewritten:
            rewritten["anyOf"] = rewritten.pop("oneOf")
        if self._drop:
            self._leave_out_odd(rewritten, path)
        if any(name in rewritten for name in (*LOW, *HIGH)):
            clamp_bounds(rewritten)
        return rewritten

    def _leave_out_odd(self, rewritten: dict[str, Any], path: tuple[str, ...]) -> None:
        """Leave out what llguidance cannot follow, of keywords that it can follow elsewhere."""
        if isinstance(rewritten.get("oneOf"), list) and "anyOf" not in rewritten:
            rewritten["anyOf"] = rewritten["oneOf"]
            self._leave_out(rewritten, path, "oneOf")
        if not are_names(required := rewritten.get("required", [])):
            self._leave_out(rewritten, path, "required")
            required = []
        kinds = rewritten.get("type", "object")
        if not are_names(kinds := [kinds] if isinstance(kinds, str) else kinds) or not {*kinds} <= TYPES:
            self._leave_out(rewritten, path, "type")
        if isinstance(rewritten.get("$ref"), str) and rewritten["$ref"].partition("#")[0] not in self._addresses:
            self._leave_out(rewritten, path, "$ref")
        if isinstance(properties := rewritten.get("properties"), dict) and not properties.keys() <= {*required}:
            closed = rewritten.get("additionalProperties", self._open) is False
            for name in ("minProperties", "maxProperties"):
                if name in rewritten and not (closed and name == "minProperties" and rewritten[name] in (0, 1)):
                    self._leave_out(rewritten, path, name)

    def _leave_out(self, rewritten: dict[str, Any], path: tuple[str, ...], name: str) -> None:
        self._count(1 + sum(map(len, path)) // 64)
        del rewritten[name]
        self.dropped.append(".".join((*path, name)))
