"""docs/how/architecture.md is the map of the code: its folders, files and functions are those that are there."""

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


def folders() -> dict[str, list[str]]:
    """Each folder of the map, and the files with which its row says to begin."""
    section = PAGE.partition("## The map\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `((?:engine|producers|workers)/\w+/)` \| .* \| (.*) \|$", section, re.MULTILINE)
    return {folder: re.findall(r"`([\w/]+\.py)`", files) for folder, files in rows}


def test_the_map_has_every_folder_of_the_packages() -> None:
    there = {
        f"{package}/{folder.name}/"
        for package in ("engine", "producers", "workers")
        for folder in (ROOT / package).iterdir()
        if any(folder.glob("*.py"))
    }
    assert there <= folders().keys()


def test_the_files_of_the_map_are_there() -> None:
    named = [folder + file for folder, files in folders().items() for file in files]
    assert len(named) > 50
    assert [name for name in named if not (ROOT / name).exists()] == []
