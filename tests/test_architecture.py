"""docs/how/architecture.md names functions that are there: the table of one token's way, compared with the code."""

from __future__ import annotations

import ast
import re

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "how" / "architecture.md").read_text("utf-8")


def way() -> list[tuple[str, list[str]]]:
    """Each row's file, and the names of its functions."""
    section = PAGE.partition("## Follow one token\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| `([\w/.]+)` \| (`.*`) \|$", section, re.MULTILINE)
    return [(file, re.findall(r"`([\w.]+)`", names)) for file, names in rows]


def defined(file: str) -> set[str]:
    """Its functions and classes; methods with and without their class."""
    found = set()
    for node in ast.parse((ROOT / file).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = (one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {name for one in inner for name in (one, f"{node.name}.{one}")}
    return found


def test_the_functions_on_the_way_of_a_token_are_there() -> None:
    rows = way()
    assert len(rows) == 15
    assert [(file, name) for file, names in rows for name in names if name not in defined(file)] == []
