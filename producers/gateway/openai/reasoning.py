"""Reasoning: what a model writes between its marks before it answers, apart from the answer, and bounded.

request: effort, budget ─▶ what the model's template says: marks, variables ─▶ how the output begins ─▶ grammar, syntax

A chat template has the marks of a model that reasons, and often begins the reasoning itself, or closes it. The grammar
lets the output reason first, for as many tokens as its budget has, and then has the form that was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from engine.grammar.source import budget_line
from engine.params import MAX_GRAMMAR, grammar_of
from engine.text import Tokenizer
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_state import Work
from producers.gateway.openai.parameters import count, flag, refusal
from producers.gateway.openai.tools import json_rule
from producers.gateway.text.prompts import Prompts, Templates

#: Reasoning effort, as OpenAI names it -> the most tokens of reasoning; None: any number.
EFFORTS: Final[dict[str, int | None]] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": None,
    "xhigh": None,
}
#: The largest budget; and the one that is none, as with vLLM and Gemini.
MAX_BUDGET, NO_BUDGET = 1 << 20, -1
#: The parameters that set a budget: Qwen's name, and vLLM's.
BUDGETS: Final = ("thinking_budget", "thinking_token_budget")
_BUDGET: Final = {"type": "integer", "minimum": NO_BUDGET, "maximum": MAX_BUDGET}
#: JSON schemas of the parameters that chat completions and responses share.
BUDGET_PARAMETERS: Final[dict[str, Any]] = dict.fromkeys(BUDGETS, _BUDGET)
#: JSON schemas of the parameters of chat completions.
REASONING_PARAMETERS: Final[dict[str, Any]] = {
    "reasoning_effort": {"enum": list(EFFORTS)},
    "include_reasoning": {"type": "boolean"},
    **BUDGET_PARAMETERS,
}
#: Variables by which templates take an effort, and whether to reason at all.
_EFFORT, _ENABLE = "reasoning_effort", "enable_thinking"
#: The beginning of a choice's grammar (`engine.params.grammar_of`).
_CHOICE: Final = "start: CHOICE\nCHOICE: "
_CHAT: Final = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts around a family's reasoning. `name`: by which records know them."""

    name: str
    begin: str
    end: str


#: Of Qwen 3, DeepSeek R1 and most others; and of Mistral's Magistral.
MARKS: Final = (Marks("think", "<think>", "</think>"), Marks("mistral", "[THINK]", "[/THINK]"))
#: Of gpt-oss' harmony, whose messages have channels (`producers.gateway.openai.harmony`): the first is the analysis.
HARMONY_MARKS: Final = Marks("harmony", "<|channel|>", "<|end|>")
#: The other tokens of harmony, in the order of `ReasoningSyntax.others`.
_HARMONY: Final = ("<|message|>", "<|start|>", "<|constrain|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class ReasoningRequest:
    """The reasoning that a request asks for. `budget`: the most tokens of reasoning, by its own parameter; NO_BUDGET:
    any number, whatever the effort. `include`: whether the answer has the reasoning. `parameter`: the one that asks for
    reasoning; None if none does. `firm`: whether a budget that cannot be kept is refused; else there is none then.
    `effort_name`: the parameter of the effort, for errors."""

    effort: str | None = None
    budget: int | None = None
    include: bool = True
    parameter: str | None = None
    firm: bool = True
    effort_name: str = _EFFORT


def read_reasoning(values: Mapping[str, Any], effort: Any, parameter: str) -> ReasoningRequest:
    """The request's parameters. `effort`: the value of `parameter`; None where it is not given. Raises Problem."""
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise refusal(parameter, effort, f"one of {', '.join(EFFORTS)}")
    budgets = {name: count(values, name, NO_BUDGET, MAX_BUDGET) for name in BUDGETS if name in values}
    if len(budgets) > 1:
        raise invalid_value(BUDGETS[1], f"{BUDGETS[0]} and {BUDGETS[1]} mean the same; give one of them")
    bounding = [name for name, budget in budgets.items() if budget != NO_BUDGET]
    asking = [*bounding, *([parameter] if effort not in (None, "none") else [])]
    return ReasoningRequest(
        effort=effort,
        budget=next(iter(budgets.values()), None),
        include=flag(values, "include_reasoning", True),
        parameter=asking[0] if asking else None,
    )


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The marks that separate an output's reasoning from its answer.

    `begin`, `end`: the tokens of the marks; None if those are text. `special`: whether these tokens have no text.
    `opened`: whether the prompt has the first mark. `include`: whether the answer has the reasoning.
    `others`: harmony's other tokens.
    """

    marks: Marks
    begin: int | None
    end: int | None
    special: bool
    opened: bool
    include: bool = True
    others: tuple[int, ...] = ()

    @property
    def harmony(self) -> bool:
        return self.marks is HARMONY_MARKS

    def to_json(self) -> str:
        """The syntax as a record has it."""
        kept = [self.marks.name, self.begin, self.end, self.special, self.opened, self.include, *self.others]
        return json.dumps(kept)

    @classmethod
    def from_json(cls, kept: str | None) -> Self | None:
        """The syntax that a record has; None without one, or for marks of a later release."""
        if not kept:
            return None
        name, *values = json.loads(kept)
        marks = next((marks for marks in (*MARKS, HARMONY_MARKS) if marks.name == name), None)
        if marks is None or len(values) < 5:
            return None
        begin, end, special, opened, include, *others = values
        return cls(marks, begin, end, special, opened, include, tuple(others))


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A task whose output reasons first, with what tells its reasoning; None if it has none. `names`: a task's field ->
    the caller's name."""

    task: Task
    syntax: ReasoningSyntax | None
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A model's way to reason on one request. `syntax`: None if the output has no reasoning. `budget`: the most tokens;
    None: any number. `variables`: what the chat template is rendered with for it. `added`: tokens that may stand in
    text, beside plain ones."""

    syntax: ReasoningSyntax | None
    budget: int | None
    variables: Mapping[str, Any]
    added: tuple[int, ...] = ()
    parameter: str | None = None
    marks: tuple[str, ...] = field(default=())
    """The marks, which have no other place in an output."""

    def applied(self, task: Task, names: Mapping[str, str], *, calling: bool) -> Reasoned:
        """The task whose output reasons first. `names`: a task's field -> the caller's name. `calling`: whether its
        grammar is that of tools. Raises InvalidTask."""
        if self.syntax is None:
            return Reasoned(task, None, names)
        form = "start: TEXT\nTEXT: /(.|\\n)*/"
        parameter = self.parameter
        if calling:
            assert task.grammar is not None, "tools have a grammar"
            form, parameter = task.grammar, "tools"
        elif task.grammar is not None and task.grammar.startswith(_CHOICE):
            form, parameter = task.grammar, "choice"
        elif task.grammar is not None:
            if self.budget is not None:
                message = f"{parameter} is given beside a grammar, which is that of the whole output; give one of them"
                raise InvalidTask(message, param=parameter)
            return Reasoned(task, None, names)
        elif task.json_schema is not None:
            schema = task.formed().json_schema
            assert schema is not None, "a schema stays one"
            form, parameter = f"start: {json_rule(schema)}", "json_schema"
        elif task.regex is not None:
            form, parameter = f"start: /(?:{_in_slashes(task.regex)})/", "regex"
        elif task.choice:
            form, parameter = grammar_of(task.choice), "choice"
        elif self.budget is None:
            return Reasoned(task, self.syntax, names)
        elif self.added:
            form = f"start: (TEXT added)* TEXT\nadded: {_any_of(self.added)}\nTEXT: /(.|\\n)*/"
        grammar = self._before(form, calling)
        if len(grammar) > MAX_GRAMMAR:
            message = f"{parameter} has {len(grammar)} characters as a form behind reasoning; at most {MAX_GRAMMAR}"
            raise InvalidTask(f"{message} are taken", param=parameter)
        forms = {"grammar": grammar, "json_schema": None, "regex": None, "choice": (), "open_objects": False}
        names = {**names, "grammar": names.get(parameter or "", parameter or "")}
        return Reasoned(task.model_copy(update=forms), self.syntax, names)

    def _before(self, form: str, calling: bool) -> str:
        """The grammar of reasoning before a form, which is a grammar whose first rule is `start`. `calling`: whether
        that is of tools."""
        syntax = self.syntax
        assert syntax is not None, "there is reasoning"
        if syntax.harmony:
            return self._before_in_harmony(form, calling)
        rules = [re.sub("^start:", "body:", form, count=1)]
        # White space after the mark: text has its own.
        gap = "" if "\nTEXT: " in form else "gap "
        if gap:
            rules.append(r'gap: ("\n\n" | "\n")?')
            rules = [rules[0].replace("\nPLAIN: /[^{]", "\nPLAIN: /[^{ \\n]"), *rules[1:]]
        begin, end = (
            json.dumps(mark) if token is None else f"<[{token}]>"
            for mark, token in ((syntax.marks.begin, syntax.begin), (syntax.marks.end, syntax.end))
        )
        if self.budget == 0:
            return "\n".join([f"start: {end} {gap}body" if syntax.opened else "start: body", *rules])
        if syntax.end is None:
            thought = "thought"
            rules.append(rf"thought[lazy]: /(.|\n)*/ {end}")
        else:
            thought = f"thought {end}"
            rules.append("thought: THOUGHT" if not self.added else "thought: (THOUGHT thinking)* THOUGHT")
            rules += [r"THOUGHT: /(.|\n)*/", *([f"thinking: {_any_of(self.added)}"] if self.added else [])]
        whole = f"start: {thought} {gap}body" if syntax.opened else f"start: body | {begin} {thought} {gap}body"
        budget = ""
        if self.budget is not None and syntax.end is not None:
            budget = budget_line(self.budget, syntax.end, None if syntax.opened else syntax.begin)
        return budget + "\n".join([whole, *rules])

    def _before_in_harmony(self, form: str, calling: bool) -> str:
        """The same in harmony: a message of analysis, and then a call or a message of the channel `final`."""
        syntax = self.syntax
        assert syntax is not None, "there is reasoning"
        channel, end, message, start = (f"<[{token}]>" for token in (syntax.begin, syntax.end, *syntax.others[:2]))
        rules = [re.sub("^start:", "body:" if calling else "answered:", form, count=1)]
        if not calling:
            rules.append(f'body: {channel} "final" {message} answered')
        if self.budget == 0:
            return "\n".join(["start: body", *rules])
        whole = f'start: body | {channel} "analysis" {message} THOUGHT {end} {start} "assistant" body'
        line = ""
        if self.budget is not None and syntax.end is not None:
            line = budget_line(self.budget + _HEADER, syntax.end, syntax.begin)
        return line + "\n".join([whole, *rules, r"THOUGHT: /(.|\n)*/"])


#: The tokens of an analysis' head behind the first one.
_HEADER: Final = 2


def _any_of(tokens: Sequence[int]) -> str:
    return " | ".join(f"<[{token}]>" for token in tokens)


def _in_slashes(regex: str) -> str:
    """A regular expression as it stands in a grammar."""
    spelled = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda match: spelled.get(match[0], match[0]), regex, flags=re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReasoningModel:
    """A model that reasons. `template`: the text of its chat template."""

    name: str
    template: str
    tokenizer: Tokenizer
    marks: Marks

    def settled(self, request: ReasoningRequest) -> tuple[dict[str, Any], int | None]:
        """What the chat template is rendered with for a request, and the request's budget."""
        budget, variables = request.budget, dict[str, Any]()
        if request.effort not in (None, "none") and _EFFORT in self.template:
            variables[_EFFORT] = request.effort
        elif request.effort is not None and budget is None:
            budget = EFFORTS[request.effort]
        if budget == 0 and _ENABLE in self.template:
            variables[_ENABLE] = False
        return variables, None if budget == NO_BUDGET else budget

    def settlements(self) -> list[dict[str, Any]]:
        """All variables that `settled` may give."""
        requests = [ReasoningRequest(effort, budget) for effort in (None, *EFFORTS) for budget in (None, 0)]
        return [variables for variables, _ in map(self.settled, requests)]

    def reasoning(self, request: ReasoningRequest, opened: bool | None) -> Reasoning:
        """The way to reason on a request. `opened`: whether the prompt begins the reasoning; None if it has closed it.
        Raises Problem for a budget that cannot be kept."""
        variables, budget = self.settled(request)
        if opened is None:
            return Reasoning(None, None, variables)
        added = self.tokenizer.added_tokens()
        begin, end = added.get(self.marks.begin), added.get(self.marks.end)
        syntax = ReasoningSyntax(self.marks, None, None, False, opened, request.include)
        if self.marks is HARMONY_MARKS:
            syntax = replace(syntax, others=tuple(added[mark].id for mark in _HARMONY))
        if begin is not None and end is not None and begin.special == end.special:
            syntax = replace(syntax, begin=begin.id, end=end.id, special=end.special)
        elif not request.firm:
            budget = None
        elif budget is not None:
            parameter = request.parameter or request.effort_name
            raise invalid_value(
                parameter,
                f"{parameter} cannot be kept by model {shown(self.name)}: its tokenizer has no tokens for "
                f"{self.marks.begin} and {self.marks.end}, of which one is to close the reasoning; leave it out",
            )
        free = tuple(
            token.id
            for text, token in added.items()
            if not token.special and text in self.template and text not in (self.marks.begin, self.marks.end)
        )
        marks = (self.marks.begin, self.marks.end)
        return Reasoning(syntax, budget, variables, free, request.parameter or request.effort_name, marks)


async def reasoning_model(templates: Templates, prompts: Prompts, card: Mapping[str, Any]) -> ReasoningModel | None:
    """The model of a card, if it reasons: its chat template has the marks. Raises Problem."""
    if "chat" not in card["capabilities"]:
        return None
    template = await templates.with_tools(card)
    if not any(marks.end in template for marks in (*MARKS, HARMONY_MARKS)):
        return None
    tokenizer = await prompts.tokenizer(card)
    marks = marks_of(template, tokenizer)
    return None if marks is None else ReasoningModel(card["name"], template, tokenizer, marks)


async def reasoning_of(
    templates: Templates,
    prompts: Prompts,
    card: Mapping[str, Any],
    request: ReasoningRequest,
    work: Work,
    variables: Mapping[str, Any],
    *,
    begun: str | None = None,
) -> Reasoning | None:
    """The model's way to reason on a request; None for a model that does not reason. `variables`: of the chat template,
    as far as the caller sets them. `begun`: the text of the last message, where the output goes on with it.

    Raises Problem if the request asks for reasoning of a model that has none, or for a budget that cannot be kept, and
    as `Templates.render`.
    """
    model = await reasoning_model(templates, prompts, card)
    if model is None:
        refuse_where_none(request, card)
        return None
    if begun is not None:
        return model.reasoning(request, opened_in(begun, model.marks))
    more, _ = model.settled(request)
    return model.reasoning(request, await opened_by(templates, card, work, {**more, **variables}, model.marks))


def refuse_where_none(request: ReasoningRequest, card: Mapping[str, Any]) -> None:
    """Raise Problem for a request that asks for reasoning of a model that has none."""
    if request.parameter is not None:
        raise Problem(
            400,
            f"{request.parameter} is given, and model {shown(card['name'])} has no reasoning: its chat template has "
            "none of its marks; leave it out",
            code="unsupported_parameter",
            param=request.parameter,
        )


def marks_of(template: str, tokenizer: Tokenizer) -> Marks | None:
    """The marks of a model that reasons, by the text of its chat template and its tokens; None for another model."""
    added = tokenizer.added_tokens()
    harmony = (HARMONY_MARKS.begin, HARMONY_MARKS.end, *_HARMONY)
    if all(mark in added for mark in harmony) and all(mark in template for mark in harmony[:3]):
        return HARMONY_MARKS
    return next(
        (marks for marks in MARKS if marks.end in template and (marks.begin in template or marks.begin in added)), None
    )


async def opened_by(
    templates: Templates, card: Mapping[str, Any], work: Work, variables: Mapping[str, Any], marks: Marks
) -> bool | None:
    """Whether prompts begin the reasoning; None if they close it. The template does the same in any chat. Raises
    Problem."""
    options = {**variables, "add_generation_prompt": True, "continue_final_message": False}
    try:
        text = (await templates.render(card, _CHAT, work, **options)).rstrip()
    except InvalidTask:  # it takes no such chat
        return False
    return True if text.endswith(marks.begin) else None if text.endswith(marks.end) else False


def opened_in(text: str, marks: Marks) -> bool | None:
    """Whether a message that goes on is in its reasoning; None if that is closed, or there is none."""
    begin, end = text.rfind(marks.begin), text.rfind(marks.end)
    if begin < 0 and end < 0 and not text.strip():
        return False
    return True if begin > end else None
