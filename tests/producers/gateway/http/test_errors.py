"""docs/use/http.md names every code that an error may have, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
#: Who writes errors that a caller may be shown: the gateway and what it calls, and who ends tasks.
SOURCES = [
    *(ROOT / "producers").rglob("*.py"),
    *(ROOT / "producers").rglob("*.lua"),
    *(ROOT / "engine").rglob("*.py"),
    *(
        path
        for room in ("flow", "leases", "pool", "runtime", "state")
        for path in (ROOT / "workers" / room).rglob("*.py")
    ),
]
#: Of an engine that is given one id twice, where a task's is unique; of a watched folder's file that is gone; of
#: a plain Celery message, whose sender alone reads it.
NEVER_SHOWN = {"duplicate_request", "file_gone", "task_exists"}


def codes_of(path: Path) -> set[str]:
    source = path.read_text()
    if path.suffix == ".lua":
        return set(re.findall(r'"code":"(\w+)"', source))
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)) if re.search("code|CODES|FAULTS|QUEUE_FULL|error_json", source) else ():
        for value in values(node):
            found |= {one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and one.value is not None}
    return {code for code in found if isinstance(code, str) and re.fullmatch("[a-z][a-z0-9_]+", code)}


def values(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions for what is called `code` here."""
    match node:
        case ast.Call(func=ast.Name(id="error_json"), args=[code, *_]):
            yield code
        case ast.keyword(arg="code", value=ast.Constant() | ast.IfExp() as code):
            yield from branches(code)
        case ast.Assign(targets=[ast.Name(id="code")], value=ast.Constant() | ast.IfExp() as code):
            yield from branches(code)
        case ast.AnnAssign(target=ast.Name(id="FAULTS"), value=ast.Dict(keys=keys)):
            yield from (key for key in keys if key is not None)
        case ast.AnnAssign(target=ast.Name(id="CODES"), value=ast.Dict(values=found)):
            yield from found
        case ast.AnnAssign(target=ast.Name(id="QUEUE_FULL"), value=ast.Dict(values=found)):
            yield from (said.elts[0] for said in found if isinstance(said, ast.Tuple))
        case ast.Dict(keys=keys, values=found):
            for key, value in zip(keys, found, strict=True):
                if isinstance(key, ast.Constant) and key.value == "code":
                    yield from branches(value)
        case ast.arguments():
            places = [*zip(reversed(node.args), reversed(node.defaults), strict=False)]
            for arg, default in [*places, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                if arg.arg == "code" and default is not None:
                    yield default


def branches(value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(value, ast.IfExp):
        yield from branches(value.body)
        yield from branches(value.orelse)
    elif isinstance(value, ast.Constant):
        yield value


def test_the_table_of_errors_is_that_of_the_code() -> None:
    written = {code for path in SOURCES for code in codes_of(path)} - NEVER_SHOWN
    section = (ROOT / "docs" / "use" / "http.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d[\d, ]* \| (.+?) \|", section, re.MULTILINE)
    table = [code for row in rows for code in re.findall(r"`(\w+)`", row)]
    assert len(table) == len(set(table)) > 30
    assert set(table) == written


def test_each_kind_of_source_is_read() -> None:
    """So that the comparison cannot hold for want of anything to compare."""
    assert "dead_lettered" in codes_of(ROOT / "producers" / "store" / "scripts" / "claim.lua")
    assert "engine_error" in codes_of(ROOT / "workers" / "flow" / "publisher.py")
    assert "kv_capacity_exceeded" in codes_of(ROOT / "engine" / "scheduling" / "limits.py")
    assert {"invalid_type", "invalid_value", "missing_parameter"} <= codes_of(
        ROOT / "producers" / "contract" / "fields.py"
    )
    assert "failed" in codes_of(ROOT / "producers" / "gateway" / "tasks" / "foreground.py")
