"""The formats in which families of models write calls of tools: data that grammar, parser and prompt are made of.

A chat template says which format its model has learnt. Records know a format by its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from engine.text import has_tools

#: Arguments of a call in the text that says how to call.
EXAMPLE: Final = '{"<parameter>": <value>}'
#: Stands for the function's name in a call's head.
_NAME: Final = "NAME"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of an output: `begin`, `opening`, then calls, joined by `between`, then `closing`.

    A call is `head`, in which NAME is the function's, its arguments as JSON, and `tail`. Without `begin`, an output
    that begins with { is a call. Without `between`, an output has one call. `marks`: what a tokenizer may have as one
    token. `told_by`: what a template of this format has, all of them; `but`: and none of these. `answer`: what begins
    an answer that is no call, where it has a head, too; all marks have to be tokens then. `id_prefix`, `id_digits`: of
    calls' ids. `name`: by which records know it.
    """

    name: str
    begin: str
    opening: str
    head: str
    tail: str
    between: str | None
    closing: str
    marks: tuple[str, ...]
    told_by: tuple[str, ...]
    but: tuple[str, ...] = ()
    answer: str = ""
    id_prefix: str = "call_"
    id_digits: int = 24

    def head_of(self, function: str) -> str:
        return self.head.replace(_NAME, function)

    def call_of(self, function: str, arguments: str) -> str:
        """A call as text, without the marks around it."""
        return f"{self.head_of(function)}{arguments}{self.tail}"

    def calls_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, by functions' names and arguments, as an output has them."""
        texts = [self.call_of(*call) for call in calls]
        return f"{self.begin}{self.opening}{(self.between or '').join(texts)}{self.closing}"

    def head_pattern(self) -> re.Pattern[str]:
        """Finds a head; its group is the name. Marks that are tokens may have no text."""
        before, after = self.head.split(_NAME)
        return re.compile(rf"{self._optional(before)}([\w-]+){self._optional(after)}(?=\s*\{{)")

    def _optional(self, text: str) -> str:
        parts = re.split(f"({'|'.join(map(re.escape, self.marks))})", text) if self.marks else [text]
        return "".join(f"(?:{re.escape(part)})?" if part in self.marks else re.escape(part) for part in parts)

    def id_of(self, task_id: str, choice: int, call: int) -> str:
        """A call's id: a function of the task, so that it is the same however often it is read."""
        digest = hashlib.sha256(f"{task_id}:{choice}:{call}".encode()).hexdigest()
        return f"{self.id_prefix}{digest[: self.id_digits]}"


#: Qwen 2.5 and 3, Hermes, and many that follow them.
HERMES: Final = CallFormat(
    name="hermes",
    begin="<tool_call>",
    opening="\n",
    head='{"name": "NAME", "arguments": ',
    tail="}",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    told_by=("<tool_call>", "arguments"),
    but=("<function=", "<arg_key>"),
)

#: Mistral's instruct models up to the third version of its tokenizer, whose templates want ids of nine characters.
MISTRAL: Final = CallFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    opening=" [",
    head='{"name": "NAME", "arguments": ',
    tail="}",
    between=", ",
    closing="]",
    marks=("[TOOL_CALLS]",),
    told_by=("[TOOL_CALLS] [",),
    id_prefix="",
    id_digits=9,
)

#: The same, as Nemo and others write it.
NEMO: Final = replace(MISTRAL, name="nemo", opening="[", told_by=("[TOOL_CALLS][",), but=("[TOOL_CALLS][ARGS]",))

#: Llama 3.1 to 3.3.
LLAMA: Final = CallFormat(
    name="llama",
    begin="",
    opening="",
    head='{"name": "NAME", "parameters": ',
    tail="}",
    between=None,
    closing="",
    marks=(),
    told_by=('"parameters": dictionary of argument name',),
)

#: Mistral's later models, such as Magistral and Devstral: each call has the mark.
MISTRAL_ARGS: Final = CallFormat(
    name="mistral_args",
    begin="[TOOL_CALLS]",
    opening="",
    head="NAME[ARGS]",
    tail="",
    between="[TOOL_CALLS]",
    closing="",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    told_by=("[TOOL_CALLS]", "[ARGS]"),
    but=("[CALL_ID]",),
    id_prefix="",
    id_digits=9,
)

#: DeepSeek V3 and R1.
DEEPSEEK: Final = CallFormat(
    name="deepseek",
    begin="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁call▁begin｜>",
    head="function<｜tool▁sep｜>NAME\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n<｜tool▁call▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    marks=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    told_by=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```"),
)

#: DeepSeek V3.1.
DEEPSEEK_V3_1: Final = replace(
    DEEPSEEK,
    name="deepseek_v3_1",
    head="NAME<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="<｜tool▁call▁begin｜>",
    told_by=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    but=("```",),
)

#: gpt-oss: each message has a channel, and a call names its function there. `<|call|>` ends the output.
HARMONY: Final = CallFormat(
    name="harmony",
    begin="<|channel|>commentary to=functions.",
    opening="",
    head="NAME <|constrain|>json<|message|>",
    tail="",
    between=None,
    closing="",
    marks=("<|channel|>", "<|constrain|>", "<|message|>"),
    told_by=("<|channel|>", "<|message|>", "to=functions"),
    answer="<|channel|>final<|message|>",
)

FORMATS: Final = (HERMES, MISTRAL, NEMO, LLAMA, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V3_1, HARMONY)


def format_of(template: str) -> CallFormat | None:
    """The format that the text of a chat template speaks of; None if that is none of these."""
    if not has_tools(template):
        return None
    for call_format in FORMATS:
        if all(mark in template for mark in call_format.told_by) and not any(
            mark in template for mark in call_format.but
        ):
            return call_format
    return None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What tells calls from text in an output. `begin`: the token that begins calls; None if that is text. `must`:
    whether the output has to be calls. `answer`: whether it is JSON of a schema where it is no calls."""

    format: CallFormat
    begin: int | None
    must: bool
    answer: bool = False

    def to_json(self) -> str:
        """The syntax as a record has it."""
        return json.dumps([self.format.name, self.begin, self.must, *([True] if self.answer else [])])

    @classmethod
    def from_json(cls, kept: str | None) -> Self | None:
        """The syntax that a record has; None without one, or for a format of a later release."""
        name, begin, must, *answer = json.loads(kept) if kept else ("", None, False)
        call_format = next((style for style in FORMATS if style.name == name), None)
        return None if call_format is None else cls(call_format, begin, must, bool(answer))
