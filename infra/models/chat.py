"""Chat pairs for training: questions and answers made of the standard library's docstrings and functions."""

import ast
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from workers.library.corpus import SourceFile

#: Longest answer in characters; longer ones would make chat pairs too large a share of the text.
_LONGEST_ANSWER = 600


@dataclass(frozen=True, slots=True)
class ChatPair:
    """One exchange; `system` is empty where the conversation has no system message."""

    system: str
    user: str
    assistant: str


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
        yield ChatPair(_system(rng), question.format(_module(file)), about)
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


def _module(file: SourceFile) -> str:
    return file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
