"""Checks a completions request and turns its prompts into tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from engine.declared import MAX_INT32
from producers.contract.task import MAX_LOGPROBS, MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS, Task
from producers.errors import InvalidTask, shown
from producers.gateway.context import Gateway
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_state import Work
from producers.gateway.openai.parameters import Parameters, TextRequest, flag
from producers.gateway.openai.response_format import NESTED, TEXT, formed
from producers.gateway.text.prompts import InvalidPrompt

P = TypeVar("P")
T = TypeVar("T")

#: Most prompts in one request.
MAX_PROMPTS: Final = 256
_TEXT: Final = {"type": "string", "maxLength": MAX_PROMPT_BYTES}
_IDS: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32},
}
PARAMETERS: Final = Parameters(
    own={
        "prompt": {
            "description": "text, a list of texts, token ids, or a list of lists of token ids",
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [_TEXT, _IDS]}},
            ],
        },
        "echo": {"type": "boolean"},
        "add_special_tokens": {"type": "boolean"},
        "response_format": NESTED,
    },
    renamed={name: name for name in ("max_tokens", "best_of", "logprobs")},
    required="prompt",
)
#: OpenAI's default of max_tokens.
MAX_TOKENS: Final = 16
#: Most output tokens of a complete answer, over all choices and prompts: some tens of megabytes.
MAX_ANSWER: Final = 1 << 23
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked completions request. `special`: whether the tokenizer adds its special tokens to texts."""

    text_request: TextRequest
    prompts: list[Prompt]
    echo: bool
    special: bool

    @property
    def n(self) -> int:
        return int(self.text_request.fields.get("n", 1))

    @property
    def logprobs(self) -> bool:
        return "logprobs" in self.text_request.fields

    def tasks(self) -> list[Task]:
        """A task for each prompt, before tokenisation. Raises InvalidTask."""
        return [self._task(at, prompt) for at, prompt in enumerate(self.prompts)]

    async def encoded(
        self,
        gateway: Gateway,
        card: Mapping[str, Any],
        tasks: Sequence[Task],
        work: Work,
        max_output: int | None = None,
        earlier: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Task]:
        """The tasks with token ids, checked against the model. `max_output`: the key's largest output, if it has one.
        `earlier`: the prompts that an earlier request of this Idempotency-Key made of the same texts.

        Raises InvalidTask, and as `Prompts.encode`.
        """
        texts = {at: task.prompt for at, task in enumerate(tasks) if isinstance(task.prompt, str)}
        ids = dict(enumerate(earlier or ()))
        if earlier is None:
            ids = await self._each(texts, partial(gateway.prompts.encode_all, card, work=work, special=self.special))
        usual = min(MAX_TOKENS, max_output or MAX_TOKENS)
        return [self._checked(card, at, task, ids.get(at), usual) for at, task in enumerate(tasks)]

    async def texts(self, gateway: Gateway, card: Mapping[str, Any], work: Work) -> list[str]:
        """Each prompt's text. Raises as `encoded` does."""
        ids = {at: prompt for at, prompt in enumerate(self.prompts) if not isinstance(prompt, str)}
        decoded = await self._each(ids, partial(gateway.prompts.decode_all, card, work=work))
        return [prompt if isinstance(prompt, str) else decoded[at] for at, prompt in enumerate(self.prompts)]

    async def _each(self, prompts: Mapping[int, P], work: Callable[[Sequence[P]], Awaitable[list[T]]]) -> dict[int, T]:
        """Place -> result of `work` for each prompt. Its errors name the prompt's place."""
        places = list(prompts)
        try:
            results = await work(list(prompts.values()))
        except InvalidPrompt as error:
            with self._words(places[error.at]).in_its_words():
                raise
        return dict(zip(places, results, strict=True))

    def _checked(self, card: Mapping[str, Any], at: int, task: Task, ids: tuple[int, ...] | None, usual: int) -> Task:
        """A task ready to submit. `ids`: the token ids of a text prompt, else None. `usual`: its output, if unsaid."""
        with self._words(at).in_its_words():
            if ids is None and not self.prompts[at]:
                ids = _beginning(card)
            if ids is not None:
                task = task.model_copy(update={"prompt": ids})
            if "max_tokens" not in self.text_request.fields:
                # It is only a default: a long prompt gets the tokens that are left.
                remaining = max(1, int(card["context_length"]) - len(task.prompt))
                task = task.model_copy(update={"max_tokens": min(usual, remaining)})
            task.check(card)
        return task

    def check_size(self, tasks: Sequence[Task]) -> None:
        """Raise Problem if the complete answer to all prompts would be too large."""
        output = sum(task.max_tokens or 0 for task in tasks) * self.n
        if not self.text_request.stream and output > MAX_ANSWER:
            raise invalid_value(
                "max_tokens",
                f"max_tokens is {self.text_request.fields['max_tokens']}: over all prompts and choices these are up to "
                f"{output} tokens; at most {MAX_ANSWER} are given in one answer; ask for a stream, send fewer prompts, "
                "or lower max_tokens or n",
            )
        if not self.logprobs:
            return
        tokens = output + (sum(len(task.prompt) for task in tasks) * self.n if self.echo else 0)
        logprobs = tokens * (1 + int(self.text_request.fields["logprobs"]))
        if logprobs > MAX_LOGPROBS:
            raise invalid_value(
                "logprobs",
                f"logprobs is {self.text_request.fields['logprobs']}: "
                f"over all prompts and choices these are {logprobs} log "
                f"probabilities; at most {MAX_LOGPROBS} are given in one answer; send fewer prompts, or lower the "
                "others",
            )

    def _task(self, at: int, prompt: Prompt) -> Task:
        fields = {} if "max_tokens" in self.text_request.fields else {"max_tokens": MAX_TOKENS}
        if self.echo and self.logprobs:
            fields["prompt_logprobs"] = self.text_request.fields["logprobs"]
        # The model's card says which token an empty text means; until then, a token that every model has.
        return self._words(at).task([0] if prompt == "" else prompt, **fields)

    def _words(self, at: int) -> TextRequest:
        """The request, with the caller's names for the fields of the task of prompt `at`."""
        names = self.text_request.names | {"prompt_logprobs": "logprobs"}
        if len(self.prompts) > 1:
            names |= dict.fromkeys(("prompt", "prompt_ids"), f"prompt[{at}]")
        return replace(self.text_request, names=names)


def read_completion(body: Mapping[str, Any], tenant: str | None) -> Completion:
    """The completions request in a body. Raises Problem."""
    text_request = PARAMETERS.read(body, tenant)
    text_request = formed(text_request, "response_format", text_request.own.get("response_format", TEXT))
    n, best_of = text_request.fields.get("n", 1), text_request.fields.get("best_of")
    if text_request.stream and best_of is not None and best_of != n:
        raise invalid_value(
            "best_of",
            f"best_of is {shown(best_of)} and n is {shown(n)}: the best are known at the end only, and not streamed",
        )
    return Completion(
        text_request,
        _prompts(text_request.own["prompt"]),
        flag(text_request.own, "echo"),
        flag(text_request.own, "add_special_tokens", True),
    )


def _prompts(value: Any) -> list[Prompt]:
    """The prompts: one or a list, each text or token ids. The task checks each one."""
    many = isinstance(value, list) and bool(value) and all(isinstance(element, (str, list)) for element in value)
    if not many:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise Problem(
            400,
            f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are taken",
            code="array_above_max_length",
            param="prompt",
        )
    return list(value)


def _beginning(card: Mapping[str, Any]) -> tuple[int, ...]:
    """The token that an empty text means: as in OpenAI's API, the one before every document. Raises InvalidTask."""
    tokens = [token for token in (card["bos_token_id"], *card["eos_token_ids"]) if token is not None]
    if not tokens:
        raise InvalidTask(
            f"prompt is empty, and model {shown(card['name'])} has no token for a beginning; give text, or a token id",
            param="prompt",
            code="empty_prompt",
        )
    return (int(tokens[0]),)
