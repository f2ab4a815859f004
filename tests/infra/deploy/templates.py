"""YAML, and CloudFormation's templates in it, read as Python's own types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

#: By libyaml, where PyYAML has it: the same, ten times as fast.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def document(text: str) -> Any:
    """The one document of a YAML text."""
    return yaml.load(text, _Safe)


def documents(text: str) -> Iterator[Any]:
    """All documents of a YAML text."""
    return yaml.load_all(text, _Safe)


def template(text: str) -> dict[str, Any]:
    """Its sections. Short forms are written out: !Ref is {"Ref": ...}, !Sub {"Fn::Sub": ...}."""
    sections: dict[str, Any] = yaml.load(text, _Loader)
    return sections


class _Loader(_Safe):  # type: ignore[misc]
    """YAML with CloudFormation's short forms."""


def _short_form(loader: _Loader, name: str, node: yaml.Node) -> dict[str, Any]:
    kinds = {yaml.ScalarNode: loader.construct_scalar, yaml.SequenceNode: loader.construct_sequence}
    value = kinds.get(type(node), loader.construct_mapping)(node, *(() if type(node) is yaml.ScalarNode else (True,)))
    return {name if name in ("Ref", "Condition") else f"Fn::{name}": value}


_Loader.add_multi_constructor("!", _short_form)


def chosen(value: Any, here: bool) -> Any:
    """`value` without `Fn::If` on WorkersHere."""
    if isinstance(value, dict):
        condition, yes, no = value.get("Fn::If", (None, None, None))
        if condition == "WorkersHere":
            return chosen(yes if here else no, here)
        return {key: chosen(one, here) for key, one in value.items()}
    if isinstance(value, list):
        return [one for one in (chosen(one, here) for one in value) if one != {"Ref": "AWS::NoValue"}]
    return value


def words(command: list[Any]) -> list[str]:
    """A container's command line. CloudFormation fills in numbers, names and URLs."""
    filled = {"MaxWorkers": "4", "Model": "tiny"}
    return [
        (filled[one["Ref"]] if "Ref" in one else re.sub(r"\$\{[^}]*\}", "x", one["Fn::Sub"]))
        if isinstance(one, dict)
        else one
        for one in command
    ]
