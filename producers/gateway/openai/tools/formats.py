"""The ways in which models write calls, and which of them a model's chat template speaks of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from producers.errors import InvalidTask, shown


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of an output: `begin`, `opening`, then calls, joined by `between`, then `closing`.

    A call is {"name": NAME, KEY: ARGUMENTS}, where KEY is `arguments`. Without `begin`, an output that begins with {
    is a call. Without `between`, an output has one call. `marks`: what a tokenizer may have as one token. `told_by`:
    what a template of this format has, all of them; `but`: and none of these. `id_prefix`, `id_digits`: of
    calls' ids.
    """

    begin: str
    opening: str
    arguments: str
    between: str | None
    closing: str
    marks: tuple[str, ...]
    told_by: tuple[str, ...]
    but: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_digits: int = 24

    def id_of(self, task_id: str, choice: int, call: int) -> str:
        """A call's id: a function of the task, so that it is the same however often it is read."""
        digest = hashlib.sha256(f"{task_id}:{choice}:{call}".encode()).hexdigest()
        return f"{self.id_prefix}{digest[: self.id_digits]}"


#: Qwen 2.5 and 3, Hermes, and many that follow them.
HERMES: Final = CallFormat(
    begin="<tool_call>",
    opening="\n",
    arguments="arguments",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    told_by=("<tool_call>", "arguments"),
    but=("<function=", "<arg_key>"),
)
#: Mistral's instruct models up to the third version of its tokenizer, whose templates want ids of nine characters.
MISTRAL: Final = CallFormat(
    begin="[TOOL_CALLS]",
    opening=" [",
    arguments="arguments",
    between=", ",
    closing="]",
    marks=("[TOOL_CALLS]",),
    told_by=("[TOOL_CALLS] [",),
    id_prefix="",
    id_digits=9,
)
#: The same, as Nemo and others write it.
NEMO: Final = replace(MISTRAL, opening="[", told_by=("[TOOL_CALLS][",), but=("[TOOL_CALLS][ARGS]",))
#: Llama 3.1 to 3.3.
LLAMA: Final = CallFormat(
    begin="",
    opening="",
    arguments="parameters",
    between=None,
    closing="",
    marks=(),
    told_by=('"parameters": dictionary of argument name',),
)


def format_of(model: str, template: str) -> CallFormat:
    """The format that the text of a model's chat template speaks of. Raises InvalidTask if that is none of these."""
    for one in (HERMES, MISTRAL, NEMO, LLAMA):
        if all(mark in template for mark in one.told_by) and not any(mark in template for mark in one.but):
            return one
    raise InvalidTask(
        f"the chat template of model {shown(model)} has no tools, or another way to call them than Hermes' and Qwen's "
        "(<tool_call>), Mistral's ([TOOL_CALLS]) and Llama 3's; leave tools out, or ask for a json_schema",
        param="tools",
        code="unsupported_model",
    )
