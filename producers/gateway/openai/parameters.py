"""Turns the parameters of OpenAI's endpoints into the fields of a task.

Every parameter is in one of the tables below, so that none is silently ignored: an unknown one, or one not offered
here, is refused by name. Values that a `Task` has too are checked there; a refusal names what the caller wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from engine.declared import MAX_INT32, declared
from engine.errors import renamed
from engine.params import MAX_SEED, SamplingParams
from producers.contract import model_fit
from producers.contract.fields import likely
from producers.contract.task import Task
from producers.errors import InvalidTask, UnknownModel, shown
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import PARAMETER
from producers.gateway.http.errors import Problem, check_given, invalid_value, unknown_parameter
from producers.gateway.tasks.views import errors

#: Time (s) for which a foreground request's task is kept, for inspection.
KEPT_S: Final = 300
#: Sampling parameters that the endpoints name or read in ways of their own.
_OTHERWISE: Final = frozenset({"max_tokens", "seed", "best_of", "logprobs", "prompt_logprobs"})
#: Parameters with the same name and meaning as in a task: OpenAI's, then ours and other servers' (`extra_body`).
SAME: Final[tuple[str, ...]] = (
    *(name for name in declared(SamplingParams) if name not in _OTHERWISE),
    *("open_objects", "metadata", "timeout"),
)
#: vLLM's names of the forms of an output, after `guided_` or in `structured_outputs` -> a task's field.
VLLM_FORMS: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
#: Other servers' parameter -> a task's field.
OTHER_NAMES: Final = {
    "include_stop": "include_stop",
    "include_stop_str_in_output": "include_stop",
    **{ours: ours for ours in VLLM_FORMS.values()},
    **{f"guided_{theirs}": ours for theirs, ours in VLLM_FORMS.items()},
}
#: The JSON schema of vLLM's `structured_outputs`. Of its options, those that ask for nothing.
STRUCTURED: Final = "structured_outputs"
_STRUCTURED_OPTIONS: Final = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
#: Least seed: OpenAI's seeds are signed 64-bit integers, a task's are unsigned.
MIN_SEED: Final = -MAX_SEED - 1
#: The task's top_p for OpenAI's 0.
LEAST_TOP_P: Final = 1e-9
#: OpenAI's service tier -> (our tier, the tier named in the answer). Without bought scale, `scale` is the default.
SERVICE_TIERS: Final = {
    "auto": ("default", "default"),
    "default": ("default", "default"),
    "flex": ("flex", "flex"),
    "scale": ("default", "default"),
    "priority": ("priority", "priority"),
    "fast": ("priority", "priority"),
}
#: vLLM's switch of beam search.
BEAMS: Final = "use_beam_search"
#: Hints that do not apply here and change no answer: accepted and ignored.
HINTS: Final[dict[str, type]] = {
    "user": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "guided_decoding_backend": str,
    "request_id": str,
    "session_id": str,
    "client_metadata": dict,
}
_KINDS: Final[Mapping[type, str]] = {str: "string", dict: "object"}
#: Unsupported parameter -> its values that request nothing, which are accepted.
NOT_OFFERED: Final[dict[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "thinking_budget": (-1,),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "store": (False,),
    "suffix": ("",),
    "chat_template": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "cache_salt": (),
    "guided_whitespace_pattern": (),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "media_io_kwargs": ({},),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True, False),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "watermarking": (),
    "vllm_xargs": ({},),
}
#: Why a parameter is not offered, where another does what it is for.
_INSTEAD: Final = {
    "cache_salt": "which is not offered here: cached prompts are kept apart by tenant, so let the header "
    "Penstock-Tenant or the API key name another one",
    "priority": "which is not offered here: service_tier says how urgent a request is",
    **dict.fromkeys(
        ("thinking_budget", "thinking_token_budget", "include_reasoning"),
        "which is not offered here: /v1/chat/completions tells reasoning from the answer, and bounds it",
    ),
    "return_token_ids": "which is not offered here: /v1/chat/completions and /v1/completions answer token ids",
    "return_tokens_as_token_ids": "which is not offered here: return_token_ids answers token ids beside the text",
    "store": "which is not offered here: /v1/responses keeps its answers, and /v1/tasks its results",
    "documents": "which is not offered here: put their text into a message",
    "logprob_token_ids": "which is not offered here: allowed_token_ids leaves the output these tokens, and logprobs "
    "answers the likeliest",
    "repetition_detection": "which is not offered here: repetition_penalty and max_tokens bound what repeats",
    "watermarking": "which is not offered here: watermark names a key, or is false",
    "guided_whitespace_pattern": "which is not offered here: white space in JSON ends by itself; a grammar has its own",
}
_THINKING: Final = "of a chat, reasoning_effort says how much a model reasons; chat_template_kwargs has enable_thinking"
_BOUND: Final = "max_tokens bounds the output, in /v1/responses max_output_tokens"
#: Parameters of other endpoints, and of other servers -> what does the same.
_ELSEWHERE: Final = {
    "messages": "/v1/chat/completions takes messages, /v1/responses takes them as input",
    "prompt": "/v1/completions takes a prompt, /v1/chat/completions messages",
    "input": "/v1/responses takes input, /v1/chat/completions messages",
    "instructions": "/v1/responses takes instructions; in a chat they are a message of the role system",
    "response_format": "in /v1/responses it is text.format",
    "text": "in /v1/chat/completions it is response_format",
    "verbosity": "in /v1/responses it is text.verbosity",
    "reasoning_effort": "in /v1/responses it is reasoning.effort",
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict"), _BOUND),
    **dict.fromkeys(("enable_thinking", "think", "thinking"), _THINKING),
    "usage": "an answer has its usage; stream_options.include_usage asks for it in a stream",
    **dict.fromkeys(
        ("options", "keep_alive"), "that is Ollama's: its options are parameters here, and models stay loaded"
    ),
}
#: vLLM's parameters of a prompt's tokens, and of those of an answer.
TRUNCATE, SIDE, TOKEN_IDS = "truncate_prompt_tokens", "truncation_side", "return_token_ids"
SIDES: Final = ("left", "right")
TOKEN_PARAMETERS: Final[dict[str, Any]] = {
    TRUNCATE: {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": MAX_INT32}]},
    SIDE: {"enum": list(SIDES)},
    TOKEN_IDS: {"type": "boolean"},
}
#: Why a parameter is not offered, where nothing else does what it is for.
NOT_HERE: Final = "which is not offered here"
#: The endpoints' answers for OpenAPI: complete, or as a stream.
RESPONSES: Final = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}},
    **errors(404, 409, 413, 415, 422, 429, 504),
}
#: Stream options of OpenAI, and vLLM's `continuous_usage_stats`, which load generators use.
STREAM_OPTIONS: Final = ("include_usage", "continuous_usage_stats", "include_obfuscation")
#: The stream option that is known, and only taken as false.
OBFUSCATION: Final = "include_obfuscation"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request, checked as far as possible without its model.

    `endpoint_values`: the endpoint's own parameters. `fields`: the task's fields without the prompt. `names`: a task's
    field -> the caller's name for it, where they differ.
    """

    model: str
    endpoint_values: dict[str, Any]
    fields: dict[str, Any]
    names: dict[str, str]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    service_tier: str
    tier_given: bool

    def naming(self) -> AbstractContextManager[None]:
        """Errors raised within have the caller's names of a task's fields."""
        return naming(self.names)

    def task(self, prompt: Any, **fields: Any) -> Task:
        """The task of one prompt, with the form that its outputs follow. Raises InvalidTask."""
        with self.naming():
            return Task(**({"model": self.model, "prompt": prompt, "ttl": KEPT_S} | self.fields | fields)).formed()


@dataclass(frozen=True, slots=True)
class Truncation:
    """The truncation of a prompt. `tokens`: the most that are kept; -1: as many as leave room for the output. `side`:
    the one from which tokens go."""

    tokens: int
    side: str = SIDES[0]

    def of(self, prompt: tuple[int, ...], task: Task, card: Mapping[str, Any]) -> tuple[int, ...]:
        """The kept part of a task's prompt. With -1 all of it where no prompt leaves room: the task is refused then."""
        limit = self.tokens if self.tokens != -1 else model_fit.longest_prompt(task, card)
        if limit < 1 or len(prompt) <= limit:
            return prompt
        return prompt[-limit:] if self.side == SIDES[0] else prompt[:limit]


def read_truncation(values: Mapping[str, Any]) -> Truncation | None:
    """The truncation that the caller allows; None: prompts are not cut. Raises Problem."""
    side = values.get(SIDE, SIDES[0])
    if side not in SIDES:
        raise refusal(SIDE, side, " or ".join(SIDES))
    tokens = values.get(TRUNCATE)
    if tokens is None:
        return None
    expected = f"an integer from 1 to {MAX_INT32}, or -1 (as many as leave room for the output)"
    if type(tokens) is not int:
        raise refusal(TRUNCATE, tokens, expected, code="invalid_type")
    if tokens != -1 and not 1 <= tokens <= MAX_INT32:
        raise refusal(TRUNCATE, tokens, expected)
    return Truncation(tokens, side)


def in_one_piece(name: str) -> Problem:
    """The refusal of a parameter that no stream can have."""
    return invalid_value(name, f"{name} is for answers in one piece; leave it out, or ask for stream: false")


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised within name a task's fields as their caller does. `names`: a task's field -> the caller's name.

    A message says itself where it names a field (`engine.errors.ErrorText`); nothing else in it changes.
    """
    try:
        yield
    except UnknownModel:
        raise
    except InvalidTask as error:
        message, param = renamed(error.message, names), names.get(error.param or "", error.param)
        raise InvalidTask(message, param=param, code=error.code) from None
    except Problem as error:
        error.message, error.param = renamed(error.message, names), names.get(error.param or "", error.param)
        raise


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of an endpoint; a null one counts as missing.

    `endpoint_schemas`: the endpoint's own, with their JSON schemas. `renamed`: its parameter -> a task's field.
    `required`: the one that must be given, beside the model. `page`: that of the docs. `hints`: another endpoint's
    parameter -> what does the same here; they go before the usual ones.
    """

    endpoint_schemas: Mapping[str, Mapping[str, Any]]
    renamed: dict[str, str]
    required: str
    same: Sequence[str] = SAME
    not_offered: Mapping[str, tuple[Any, ...]] = field(default_factory=NOT_OFFERED.copy)
    stream_options: Sequence[str] = STREAM_OPTIONS
    page: str = "docs/use/http.md"
    hints: Mapping[str, str] = field(default_factory=dict)

    def openapi(self) -> dict[str, Any]:
        """OpenAPI's part of the endpoint: the schema of its body, with all accepted parameters and a task's limits."""
        task = Task.model_json_schema()["properties"]
        properties = {
            "model": task["model"],
            **{name: {"type": _KINDS[kind], "description": "taken, and not used"} for name, kind in HINTS.items()},
            **{name: {"enum": [None, *nothing]} for name, nothing in self.not_offered.items()},
            **self.endpoint_schemas,
            **{name: task[name] for name in self.same},
            **{name: task[ours] for name, ours in (OTHER_NAMES | self.renamed).items()},
            STRUCTURED: {
                "type": "object",
                "maxProperties": 1,
                "properties": {
                    **{theirs: task[ours] for theirs, ours in VLLM_FORMS.items()},
                    "json_object": {"const": True},
                },
                "additionalProperties": False,
            },
            "seed": {"type": "integer", "minimum": MIN_SEED, "maximum": MAX_SEED},
            "service_tier": {"enum": list(SERVICE_TIERS)},
            BEAMS: {"type": "boolean"},
            "stream": {"type": "boolean"},
            "stream_options": {
                "type": "object",
                "properties": {name: {"type": "boolean"} for name in self.stream_options if name != OBFUSCATION},
            },
        }
        schema = {
            "type": "object",
            "required": ["model", self.required],
            "properties": properties,
            "additionalProperties": False,
        }
        called = (
            [name for name, ours in self.renamed.items() if ours == field_name]
            for field_name in set(self.renamed.values())
        )
        if alike := [names for names in called if len(names) > 1]:
            schema["not"] = {"anyOf": [{"required": names} for names in alike]}
        return {
            "parameters": [PARAMETER, idempotency.PARAMETER],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        }

    def read(self, body: Mapping[str, Any], tenant: str | None) -> TextRequest:
        """The request in a body. `tenant`: the caller's. Raises Problem."""
        values = {name: value for name, value in body.items() if value is not None}
        renamed = OTHER_NAMES | self.renamed
        self._check_known(values, renamed)
        check_given(values, "model", self.required)
        if not isinstance(values["model"], str) or not values["model"]:
            raise refusal("model", values["model"], "the name of a model", code="invalid_type")
        tier = values.get("service_tier", "auto")
        if not isinstance(tier, str) or tier not in SERVICE_TIERS:
            raise refusal("service_tier", tier, f"one of {', '.join(SERVICE_TIERS)}")
        ours, echoed = SERVICE_TIERS[tier]
        stream = flag(values, "stream")
        theirs: dict[str, str] = {}
        for name in (name for name in renamed if name in values):
            other = theirs.setdefault(renamed[name], name)
            if other != name:
                raise invalid_value(name, f"{other} and {name} mean the same; give one of them")
        fields = {name: values[name] for name in self.same if name in values}
        fields |= {renamed[name]: values[name] for name in renamed if name in values}
        if (structured := _structured(values)) is not None:
            name, ours_of_it, value = structured
            if ours_of_it in fields:
                raise invalid_value(
                    name, f"{theirs.get(ours_of_it, ours_of_it)} and {name} mean the same; give one of them"
                )
            fields[ours_of_it], theirs[ours_of_it] = value, name
        fields |= _seed(values) | _top_k(values) | _top_p(values)
        _set_beams(values, fields, theirs)
        fields |= {} if tenant is None else {"tenant": tenant}
        options = _stream_options(values, stream, self.stream_options)
        include_usage = options.get("include_usage", False)
        return TextRequest(
            model=values["model"],
            endpoint_values={name: values[name] for name in self.endpoint_schemas if name in values},
            fields=fields | {"tier": ours},
            names=dict.fromkeys(("prompt", "prompt_ids"), self.required) | theirs,
            stream=stream,
            include_usage=include_usage,
            continuous_usage=include_usage and options.get("continuous_usage_stats", False),
            service_tier=echoed,
            tier_given="service_tier" in values,
        )

    def _check_known(self, values: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        offered = {
            "model",
            "stream",
            "stream_options",
            "service_tier",
            "seed",
            BEAMS,
            STRUCTURED,
            *self.same,
            *self.endpoint_schemas,
            *renamed,
        }
        recognised = {*offered, *HINTS, *self.not_offered}
        for name, value in values.items():
            if name not in recognised:
                near = likely(name, recognised)
                hint = f"did you mean {shown(near)}?" if near else f"see {self.page} for what is taken"
                raise unknown_parameter(name, {**_ELSEWHERE, **self.hints}.get(name, hint))
            nothing = self.not_offered.get(name)
            if nothing is not None and not any(_same(value, neutral) for neutral in nothing):
                raise refused(name, value, nothing, _INSTEAD.get(name, NOT_HERE))
            if name in HINTS and not isinstance(value, HINTS[name]):
                kind = "a string" if HINTS[name] is str else "an object"
                raise refusal(name, value, f"{kind} (it is not used here)", code="invalid_type")


def check_chats(card: Mapping[str, Any]) -> None:
    """Raise InvalidTask for a model without a chat template."""
    if "chat" not in card["capabilities"]:
        message = f"model {shown(card['name'])} has no chat template; send its prompts to /v1/completions"
        raise InvalidTask(message, param="model", code="unsupported_model")


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean parameter. Raises Problem."""
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise refusal(name, value, "true or false", code="invalid_type")
    return value


def count(values: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    """An integer parameter within its limits; None if it is missing. Raises Problem."""
    value = values.get(name)
    expected = f"an integer from {minimum} to {maximum}"
    if value is None:
        return None
    if type(value) is not int:
        raise refusal(name, value, expected, code="invalid_type")
    if not minimum <= value <= maximum:
        raise refusal(name, value, expected)
    return value


def refusal(name: str, value: Any, expected: str, code: str = "invalid_value") -> Problem:
    return Problem(400, f"{name} is {shown(value)}; {name} must be {expected}", code=code, param=name)


def _seed(values: Mapping[str, Any]) -> dict[str, int]:
    """The task's seed. -1 means a random one, as in vLLM and llama.cpp; other negative ones lose their sign bit."""
    seed = count(values, "seed", MIN_SEED, MAX_SEED)
    return {} if seed is None or seed == -1 else {"seed": seed & MAX_SEED}


def _top_k(values: Mapping[str, Any]) -> dict[str, int]:
    """The task's top_k if given as -1, which is vLLM's value for off: 0."""
    top_k = values.get("top_k")
    return {"top_k": 0} if type(top_k) is int and top_k == -1 else {}


def _top_p(values: Mapping[str, Any]) -> dict[str, float]:
    """The task's top_p if given as 0, which OpenAI takes: so small that the likeliest token alone is kept."""
    top_p = values.get("top_p")
    return {"top_p": LEAST_TOP_P} if type(top_p) in (int, float) and top_p == 0 else {}


def _set_beams(values: Mapping[str, Any], fields: dict[str, Any], theirs: dict[str, str]) -> None:
    """Set the beams that `use_beam_search` asks for: as many as `best_of` or `n` says, if `beam_width` does not. Enters
    into `theirs` which. Raises Problem."""
    if not flag(values, BEAMS, "beam_width" in fields):
        if "beam_width" in fields:
            raise invalid_value(
                BEAMS, f"{BEAMS} is false, and beam_width is {shown(fields['beam_width'])}; leave one out"
            )
    elif "beam_width" not in fields:
        name = "best_of" if "best_of" in fields else "n"
        fields["beam_width"], theirs["beam_width"] = (
            fields.pop("best_of") if name == "best_of" else fields.get("n", 1),
            name,
        )


def _structured(values: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """The form in `structured_outputs`: the parameter's name, the task's field, its value. Raises Problem."""
    value = values.get(STRUCTURED)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refusal(STRUCTURED, value, "an object", code="invalid_type")
    parts = {name: part for name, part in value.items() if part is not None}
    forms = [*VLLM_FORMS, "json_object"]
    for name, part in parts.items():
        if name in _STRUCTURED_OPTIONS and part is not False:
            raise refused(f"{STRUCTURED}.{name}", part, (False,))
        if name not in (*forms, *_STRUCTURED_OPTIONS):
            raise unknown_parameter(f"{STRUCTURED}.{shown(name)[1:-1]}", f"there is {', '.join(forms)}")
    chosen = [name for name in parts if name in forms and not (name == "json_object" and parts[name] is False)]
    if len(chosen) > 1:
        raise invalid_value(STRUCTURED, f"{STRUCTURED} has {' and '.join(chosen)}; an output has one form")
    if not chosen:
        return None
    (name,) = chosen
    if name == "json_object":
        flag(parts, name)
        return f"{STRUCTURED}.{name}", "json_schema", {"type": "object"}
    return f"{STRUCTURED}.{name}", VLLM_FORMS[name], parts[name]


def _stream_options(values: Mapping[str, Any], stream: bool, offered: Sequence[str]) -> dict[str, bool]:
    options = values.get("stream_options")
    if options is None:
        return {}
    if not stream:
        raise invalid_value("stream_options", "stream_options is for streams; leave it out, or ask for stream: true")
    if not isinstance(options, dict):
        raise refusal("stream_options", options, "an object", code="invalid_type")
    for name, value in options.items():
        parameter = f"stream_options.{name}"
        if name not in offered:
            raise unknown_parameter(parameter, f"there is {', '.join(offered)}")
        if not isinstance(value, bool):
            raise refusal(parameter, value, "true or false", code="invalid_type")
    if options.get(OBFUSCATION):
        raise refused(f"stream_options.{OBFUSCATION}", True, (False,))
    return options


def _same(value: Any, nothing: Any) -> bool:
    return type(value) is type(nothing) and bool(value == nothing)


def refused(name: str, value: Any, nothing: Sequence[Any], why: str = NOT_HERE) -> Problem:
    """The error for a parameter that is not offered. `nothing`: its values that are accepted."""
    neutral = " or ".join(map(shown, nothing))
    hint = f" or give {neutral}" if neutral else ""
    return Problem(
        400,
        f"{name} is {shown(value)}, {why}; leave it out{hint}",
        code="unsupported_parameter",
        param=name,
    )
