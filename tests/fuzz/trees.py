"""JSON that its own writers would not write: trees are changed at any place, and written with what no dict can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """Stands in the text as it is, JSON or not."""

    text: str


@dataclass(frozen=True, slots=True)
class Twice:
    """In an object: the key comes twice, with these two values. Elsewhere: the second one."""

    first: Any
    second: Any


def write(tree: Any, *, ascii_only: bool = True) -> str:
    """As JSON text; with `ascii_only` off, what is no ASCII (lone surrogates, too) stands there unescaped."""
    match tree:
        case Raw(text):
            return text
        case Twice(_, second):
            return write(second, ascii_only=ascii_only)
        case dict():
            pairs = []
            for key, value in tree.items():
                for one in (value.first, value.second) if isinstance(value, Twice) else (value,):
                    pairs.append(f"{json.dumps(key, ensure_ascii=ascii_only)}:{write(one, ascii_only=ascii_only)}")
            return "{" + ",".join(pairs) + "}"
        case list() | tuple():
            return "[" + ",".join(write(one, ascii_only=ascii_only) for one in tree) + "]"
        case _:
            return json.dumps(tree, ensure_ascii=ascii_only)


def paths(tree: Any, here: Path = ()) -> list[Path]:
    """Every place in it, the root first."""
    found = [here]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += paths(value, (*here, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree[:4]):
            found += paths(value, (*here, index))
    return found


def at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def replaced(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with what is at `path` changed; where `change` gives LEFT_OUT, without it."""
    if not path:
        return change(tree)
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    new = replaced(tree[path[0]], path[1:], change)
    if new is LEFT_OUT:
        del copy[path[0]]
    else:
        copy[path[0]] = new
    return copy


LEFT_OUT: Any = object()

#: Text that means something to somebody on the way: C, a shell, a log, a template, a terminal, Redis, SSE, Celery.
STRINGS = (
    *(
        "",
        " ",
        "\x00",
        "a\x00b",
        "\r\n",
        "x" * 300,
        "x" * 70_000,
        "\ud800",
        "a\udfffb",
        "\udc80\udcff",
        "é",
        "💥",
        "\u202e",
    ),
    *(
        "../../etc/passwd",
        "{{7*7}}",
        "%s%n%d",
        "$(id)",
        "'; --",
        "<script>",
        "\x1b[2J",
        "*",
        "penstock:*",
        "data: x\n\n",
    ),
    *(
        "penstock.generate",
        "celery.chord_unlock",
        "NaN",
        "null",
        "true",
        "0",
        "-1",
        "1e400",
        "9" * 5000,
        "0x10",
        "１２",
    ),
    *("2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00", "0000-00-00", "9999-12-31T23:59:59.999999", "tomorrow"),
)
NUMBERS = (
    *(0, 1, -1, 2, 64, 65, 255, 4096, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1.5, -0.1, 1e-320, 1e308, 1e15),
)
RAWS = tuple(
    map(
        Raw,
        (
            *("NaN", "Infinity", "-Infinity", "nan", "1e400", "-1e400", "9" * 5000, "-", "01", "1.", ".5", "+1", "0x1"),
            *(
                "{",
                "}",
                "[",
                "{oops",
                "{1:2}",
                '{"a"}',
                "[1,]",
                '"',
                '"\\x"',
                '"\\ud8',
                '"\\ud83d"',
                "'a'",
                "",
                "//",
                "True",
            ),
            *('"a\tb"', '"\x7f"', "\ufeff{}", "null null", "tru"),
            *("[" * depth + "]" * depth for depth in (30, 400, 990, 1200, 20_000)),
            *('{"a":' * depth + "1" + "}" * depth for depth in (30, 990, 20_000)),
            "[" * 3000,
        ),
    )
)


_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(STRINGS),
    st.text(st.characters(), max_size=12),
)
_NESTED = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(STRINGS[:12]) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
#: Of the wrong type, beyond the limits, or no JSON at all.
VALUES: st.SearchStrategy[Any] = st.one_of(_PLAIN, _PLAIN, _NESTED, st.sampled_from(RAWS))


@st.composite
def spoiled(draw: Any, tree: Any) -> Any:
    """The tree, changed at some places; often at one, or at none."""
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 1, 2, 3)))):
        path = draw(st.sampled_from(paths(tree)))
        if isinstance(at(tree, path), (Raw, Twice)):
            continue
        how = draw(st.sampled_from(("replace", "replace", "leave out", "twice", "wrap", "add", "text")))
        value = draw(VALUES)
        tree = replaced(tree, path, _change(how, value, draw(st.sampled_from(STRINGS[:20]))))
        if tree is LEFT_OUT:
            return Raw("")
    return tree


def _change(how: str, value: Any, name: str) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        match how:
            case "leave out":
                return LEFT_OUT
            case "twice":
                return Twice(value, old)
            case "wrap":
                return [old]
            case "text":
                return old if isinstance(old, str) else write(old)
            case "add" if isinstance(old, dict):
                return {**old, name: value}
            case "add" if isinstance(old, list):
                return [*old, value]
            case _:
                return value

    return change


@st.composite
def spoiled_bytes(draw: Any, data: bytes) -> bytes:
    """Cut off, with bytes put in, or left as they are (mostly)."""
    how = draw(st.sampled_from(("",) * 36 + ("cut", "insert", "overwrite", "turn")))
    if not how or not data:
        return data
    place = draw(st.integers(0, len(data)))
    piece = draw(
        st.sampled_from((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\r\n", b'"', b"}", b"\\"))
        | st.binary(max_size=8)
    )
    match how:
        case "cut":
            return data[:place]
        case "insert":
            return data[:place] + piece + data[place:]
        case "overwrite":
            return data[:place] + piece + data[place + len(piece) :]
        case _:
            return data[place:] + data[:place]


@st.composite
def json_bytes(draw: Any, tree: Any) -> bytes:
    """A tree as text, its characters escaped or not, rarely in an encoding that is not UTF-8."""
    text = write(tree, ascii_only=draw(st.integers(0, 3)) > 0)
    encoding = draw(st.sampled_from(("utf-8",) * 60 + ("utf-16", "utf-8-sig", "latin-1")))
    errors = "replace" if encoding == "latin-1" else "surrogatepass"
    return text.encode(encoding, errors)
