"""The training text: Python's standard library, which every Python installation has and may use.

A hash of the file's name decides whether it is held out. So the split is the same on every machine and Python version,
and a test can measure perplexity on files that training has never seen.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Folders that are not library text: installed packages, test suites, generated tables.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
#: Files with these prefixes are generated build settings and keyword tables, useless for training.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "pgen2", "entities")
_HELD_OUT_ONE_IN = 20
_SHORTEST_FILE = 200
#: Longest answer in characters; longer ones would make chat pairs too large a share of the text.
_LONGEST_ANSWER = 600


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library: its path below the library's root, with `/`, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True, slots=True)
class ChatPair:
    """One exchange; `system` is empty where the conversation has no system message."""

    system: str
    user: str
    assistant: str


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """All usable sources below `root` (default: this interpreter's library), sorted by name.

    Raises:
        FileNotFoundError: the interpreter carries no readable library sources (a zipped or frozen one).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _EXCLUDED_FOLDERS.intersection(relative.parts) or relative.name.startswith(_EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old files declare another encoding
            continue
        if len(text) >= _SHORTEST_FILE:
            files.append(SourceFile(relative.as_posix(), text))
    if not files:
        raise FileNotFoundError(f"no Python sources below {root}: run with an interpreter whose library is plain files")
    return files


def chat_pairs(file: SourceFile, rng: random.Random) -> Iterator[ChatPair]:
    """Makes questions and answers from a file's docstrings and functions.

    A module's name asks for its docstring; a function's docstring or signature asks for its source;
    a function's source asks for its docstring.
    """
    try:
        tree = ast.parse(file.text)
    except SyntaxError:  # lib2to3 and friends keep samples of older grammars
        return
    about = _first_paragraphs(ast.get_docstring(tree))
    if about:
        question = rng.choice(
            ["What is the {} module for?", "Describe the Python module {}.", "What does the module {} do?"]
        )
        yield ChatPair(_system(rng), question.format(file.module), about)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _function_pairs(node, file, rng)


def _function_pairs(node: ast.FunctionDef, file: SourceFile, rng: random.Random) -> Iterator[ChatPair]:
    about = _first_paragraphs(ast.get_docstring(node))
    source = _source(file.text, node)
    if not about or len(source) > _LONGEST_ANSWER:
        return
    signature = f"{node.name}({ast.unparse(node.args)})"
    summary = about.split("\n\n")[0].replace("\n", " ").rstrip(".")
    ask_for_source = [
        f"Write a Python function: {summary}.",
        f"Write the function {signature}.",
        f"Write a function {node.name}. {summary}.",
        f"def {signature}:",
    ]
    if rng.random() < 0.75:
        yield ChatPair(_system(rng), rng.choice(ask_for_source), source)
    else:
        ask_for_purpose = [f"What does this do?\n\n{source}", f"What does {signature} do?"]
        yield ChatPair(_system(rng), rng.choice(ask_for_purpose), about)


def _system(rng: random.Random) -> str:
    return "You are a helpful assistant that writes Python." if rng.random() < 0.2 else ""


def _source(text: str, node: ast.FunctionDef) -> str:
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)).strip()


def _first_paragraphs(docstring: str | None) -> str:
    """The docstring's beginning, whole paragraphs up to the length of an answer."""
    kept = ""
    for paragraph in (docstring or "").strip().split("\n\n"):
        if len(kept) + len(paragraph) > _LONGEST_ANSWER:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept.strip()
