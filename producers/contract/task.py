"""A task as a caller writes it, and its validation at the edge.

A refused task is never queued. The limits of sampling are those that `engine.params.SamplingParams` declares, so that
no worker refuses an accepted task.

    a caller's JSON -> types of fields (limits, refusals) -> Task: checked, fitted to a model -> its record
"""

from __future__ import annotations

import difflib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from engine.declared import MAX_INT32, Integer, JsonObject, Number, Strings, TokenIds, declared
from engine.declared import Biases as BiasesBound
from engine.declared import Text as TextBound
from engine.errors import ErrorText, FieldName, RequestError, renamed
from engine.grammar.schema import bounded, rules_of, to_the_letter
from engine.labels import MAX_ENTITIES, Aggregation
from engine.params import (
    DEFAULTS,
    FORMS,
    MAX_BEAMS,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_PROMPT_LOGPROBS,
    MAX_REGEX,
    MAX_SCHEMA,
    MAX_TEXT,
    NO_KEYS,
    OF_BEAMS,
    REQUIRED,
    SamplingParams,
    filled,
    grammar_of,
    has_keys,
    misused_beams,
    too_large,
)
from producers.contract import levels
from producers.contract.chat import MESSAGE, read_messages
from producers.contract.webhook import WEBHOOK, Webhook
from producers.errors import InvalidTask, shown

# Limits of a task beside those of its sampling, which `engine.params` has.
MAX_PROMPT_BYTES: Final = 1 << 20
MAX_PROMPT_TOKENS: Final = 1_000_000
MAX_TTL_S: Final = 30 * 24 * 3600
MAX_TIMEOUT_S: Final = 7 * 24 * 3600
MAX_TENANT: Final = 200
MAX_ORDER_KEY: Final = 128
#: Most log probabilities of a task's output, alternatives included: some fifty megabytes as text.
MAX_LOGPROBS: Final = 1 << 20
#: Most output tokens of a task with best_of or beams. One call publishes them and keeps the store busy for tenths of a
#: second.
MAX_BEST_TOKENS: Final = 16_384
#: Estimated bytes a token of text, which overestimates the tokens of most texts.
BYTES_PER_TOKEN: Final = 3
#: Assumed output tokens of a task without max_tokens.
ASSUMED_OUTPUT: Final = 256
#: Most texts of a task that generates nothing, and the largest result of one, as stored: readers get it in one message.
#: With MAX_PROMPT_BYTES they are the limits of a chunk, too, in which a client submits a task of more texts.
MAX_INPUTS: Final = 256
MAX_RESULT_BYTES: Final = 1 << 20
#: The same limits of a task in chunks (`producers.store.chunks`): texts, their bytes, and the bytes of its result.
MAX_TEXTS: Final = 10_000
MAX_TEXTS_BYTES: Final = 16 << 20
MAX_TEXTS_RESULT: Final = 64 << 20
#: Fields of a task that generates nothing, beside its kind.
OF_INPUT: Final = (
    "input",
    "query",
    "dimensions",
    "prompt_name",
    "aggregation_strategy",
    "threshold",
    "truncate",
    "on_error",
)
#: Fields that say who asks, and how a task is treated: those of every kind.
OF_EVERY_KIND: Final = frozenset(
    {"model", "kind", "n", "tier", "timeout", "tenant", "order_key", "metadata", "webhook", "ttl"}
)
_OF_TEXTS: Final = OF_EVERY_KIND | {"input", "truncate", "on_error"}
#: Kind -> the fields of its tasks, of those that generate nothing.
_OF_KIND: Final[Mapping[str, frozenset[str]]] = {
    "embed": _OF_TEXTS | {"dimensions", "prompt_name"},
    "rerank": _OF_TEXTS | {"query"},
    "classify": _OF_TEXTS,
    "token_classify": _OF_TEXTS | {"aggregation_strategy", "threshold"},
}
#: Characters of JSON, and numbers in it, above which the interpreter is given up now and then while they are read.
LARGE_JSON: Final = 64 * 1024
MANY_NUMBERS: Final = 1 << 18
#: Special tokens around a text, as many as most models have.
_AROUND: Final = 2
#: Longest name (characters) in an error's `param`; longer ones are cut and get no spelling hint.
MAX_LABEL: Final = 64
DECIMAL: Final = re.compile("0|[1-9][0-9]{0,9}")
_BIASES: Final[Any] = declared(SamplingParams)["logit_bias"].bound
_STOPS: Final[Any] = declared(SamplingParams)["stop"].bound


def _prompt(value: Any) -> Any:
    """Check a prompt by hand: pydantic's union would give one message per member and token. Raises InvalidTask."""
    if isinstance(value, str):
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidTask(
                ErrorText.of("{prompt} is not valid Unicode: a lone surrogate at character {}", error.start),
                param="prompt",
            ) from None
        if size > MAX_PROMPT_BYTES:
            raise InvalidTask(
                ErrorText.of("{prompt} has {} bytes of UTF-8; at most {} are taken", size, MAX_PROMPT_BYTES),
                param="prompt",
            )
    elif isinstance(value, (list, tuple)):
        if len(value) > MAX_PROMPT_TOKENS:
            raise InvalidTask(
                ErrorText.of("{prompt} has {} token ids; at most {} are taken", len(value), MAX_PROMPT_TOKENS),
                param="prompt",
            )
        if value and not ({*map(type, value)} == {int} and min(value) >= 0 and max(value) <= MAX_INT32):
            at, token = next((at, item) for at, item in enumerate(value) if not _is_token(item))
            raise InvalidTask(
                ErrorText.of("{prompt}[{}] is {}; a token id is an integer from 0 to {}", at, shown(token), MAX_INT32),
                param="prompt",
            )
    if not isinstance(value, (str, list, tuple)):
        raise InvalidTask(
            ErrorText.of("{prompt} is {}; it must be text or a list of token ids", shown(value)),
            param="prompt",
            code="invalid_type",
        )
    if not value:
        raise InvalidTask(
            ErrorText.of("{prompt} is empty; give text, or at least one token id"), param="prompt", code="empty_prompt"
        )
    return value if isinstance(value, str) else tuple(value)


def _inputs(value: Any, info: ValidationInfo) -> Any:
    """Check the texts of a task that generates nothing; each is text, or token ids. Raises InvalidTask."""
    alone = info.data.get("on_error") == "item"
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise InvalidTask(
            ErrorText.of(
                "{input} is {}; it must be a text, a list of texts, or a list of lists of token ids", shown(value)
            ),
            param="input",
            code="invalid_type",
        )
    if len(items) > MAX_TEXTS:
        raise InvalidTask(
            ErrorText.of("{input} has {} texts; at most {} are taken in one request", len(items), MAX_TEXTS),
            param="input",
            code="array_above_max_length",
        )
    inputs, size = [], 0
    for at, item in enumerate(items):
        try:
            empty = alone and isinstance(item, (str, list, tuple)) and not item
            checked_item = (item if isinstance(item, str) else ()) if empty else _prompt(item)
        except InvalidTask as error:
            named = renamed(error.message, {"prompt": ErrorText.of("{input}[{}]", at)})
            raise InvalidTask(named, param="input", code=error.code) from None
        if isinstance(checked_item, str) and "\0" in checked_item:
            raise InvalidTask(ErrorText.of("{input}[{}] has a NUL character", at), param="input")
        if (own := _bytes_of(checked_item)) > MAX_PROMPT_BYTES:
            raise InvalidTask(
                ErrorText.of(
                    "{input}[{}] has {} bytes (4 a token id); at most {} are taken", at, own, MAX_PROMPT_BYTES
                ),
                param="input",
            )
        size += own
        inputs.append(checked_item)
    if size > MAX_TEXTS_BYTES:
        raise InvalidTask(
            ErrorText.of(
                "{input} has {} bytes (4 a token id); at most {} are taken in one request", size, MAX_TEXTS_BYTES
            ),
            param="input",
        )
    return tuple(inputs)


def _bytes_of(item: str | Sequence[int]) -> int:
    """A text's bytes, as they count for limits: 4 a token id."""
    return len(item.encode()) if isinstance(item, str) else 4 * len(item)


def _is_default(task: Task, name: str) -> bool:
    return bool(getattr(task, name) == Task.model_fields[name].get_default(call_default_factory=True))


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT32


def _messages(value: Any) -> Any:
    """Check messages. Like a prompt, they are limited by size, here as stored JSON. Raises InvalidTask."""
    messages = read_messages(list(value) if isinstance(value, tuple) else value)
    try:
        size = len(json_of(messages))
    except (RecursionError, UnicodeEncodeError) as error:
        raise InvalidTask(ErrorText.of("{messages} cannot be kept as JSON: {}", error), param="messages") from None
    if size > MAX_PROMPT_BYTES:
        raise InvalidTask(
            ErrorText.of("{messages} have {} bytes as JSON; at most {} are taken", size, MAX_PROMPT_BYTES),
            param="messages",
        )
    return tuple(messages)


def json_of(messages: Any) -> bytes:
    return json.dumps(messages, ensure_ascii=False).encode()


def stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _biases(value: Any) -> Any:
    """Turn decimal string keys, as JSON has them, into token ids."""
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and DECIMAL.fullmatch(k) else k: bias for k, bias in value.items()}


def _bounded(name: str) -> BeforeValidator:
    """A check by a sampling parameter's own bound, which says more than pydantic would. Objects are kept as objects."""
    return BeforeValidator(partial(checked_form, name))


def checked_form(name: str, value: Any) -> Any:
    """A form's value, `name` a parameter, as a task has it: a schema is an object. Raises InvalidTask."""
    bound = declared(SamplingParams)[name].bound
    try:
        kept = bound.check(name, value)
    except RequestError as error:
        raise InvalidTask(error.message, param=name, code=error.code) from None
    return json.loads(kept) if isinstance(bound, JsonObject) else kept


def known_tier(value: Any) -> Any:
    return "default" if value == "auto" else value


def sampling(name: str, description: str = "") -> Any:
    """The field of a sampling parameter, with the engine's limits and default; None where a model may have its own.

    `description`: completes "it must be", in place of the engine's own.
    """
    parameter = declared(SamplingParams)[name]
    limits: dict[str, Any] = {}
    match parameter.bound:
        case Integer() as bound:
            limits = {"ge": bound.low, "le": bound.high}
        case Number() as bound:
            limits = {"gt" if bound.above else "ge": bound.low, "le": bound.high}
        case TextBound() as bound:
            limits = {"json_schema_extra": {"minLength": 1, "maxLength": bound.longest}}
        case Strings() | TokenIds() as bound:
            limits = {"max_length": bound.limit, "json_schema_extra": {"maxItems": bound.limit}}
        case BiasesBound() as bound:
            names = {"maxProperties": bound.limit, "propertyNames": {"pattern": f"^({DECIMAL.pattern})$"}}
            limits = {"max_length": bound.limit, "json_schema_extra": names, "default_factory": dict}
    if "default_factory" not in limits:
        limits["default"] = None if name in DEFAULTS else parameter.default
    return Field(description=description or parameter.bound.description, **limits)


Kind = Literal["generate", "embed", "classify", "token_classify", "rerank"]
Tier = Literal["priority", "default", "flex", "batch"]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=_STOPS.longest)]
Texts = Annotated[tuple[Text, ...], FailFast(), BeforeValidator(as_tuple, json_schema_input_type=list[Text])]
Option = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Choice = Annotated[tuple[Option, ...], FailFast(), BeforeValidator(as_tuple, json_schema_input_type=list[Option])]
Ids = Annotated[tuple[Count, ...], FailFast(), BeforeValidator(as_tuple, json_schema_input_type=list[Count])]
Bias = Annotated[float, Field(ge=-_BIASES.reach, le=_BIASES.reach)]
Biases = Annotated[dict[Count, Bias], BeforeValidator(_biases, json_schema_input_type=dict[str, Bias])]
Schema = Annotated[dict[str, Any], _bounded("json_schema")]
Regex = Annotated[str, _bounded("regex")]
Lark = Annotated[str, _bounded("grammar")]
Watermark = Annotated[str | Literal[False], _bounded("watermark")]
EarlyStopping = Annotated[bool | Literal["never"], _bounded("early_stopping")]
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
MessageList = Annotated[list[Message], Field(min_length=1)]
Messages = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_messages, json_schema_input_type=MessageList)]
#: A prompt's JSON schema, for OpenAPI; `_prompt` enforces it.
PromptText = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_BYTES)]
PromptIds = Annotated[list[Count], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
OwnWebhook = Annotated[Webhook, PlainValidator(Webhook.read), WithJsonSchema(WEBHOOK)]
Inputs = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(
        _inputs,
        json_schema_input_type=PromptText
        | Annotated[list[PromptText | PromptIds], Field(min_length=1, max_length=MAX_TEXTS)],
    ),
]
Prompt = Annotated[str | tuple[int, ...], BeforeValidator(_prompt, json_schema_input_type=PromptText | PromptIds)]


def read_json(body: str | bytes) -> Any:
    """Parse JSON text. Raises InvalidTask if it is not UTF-8 or not JSON."""
    try:
        return json.loads(body if isinstance(body, str) else body.decode(), **_turns(body))
    except UnicodeDecodeError as error:
        raise InvalidTask(f"the body is not UTF-8: bad byte at {error.start}", code="invalid_utf8") from None
    except (ValueError, RecursionError) as error:
        raise InvalidTask(f"the body is not JSON: {error}", code="invalid_json") from None


def _turns(body: str | bytes) -> dict[str, Any]:
    """Functions that read numbers of a large text. They are Python's, so other threads have their turns in between:
    the parser by itself holds the interpreter until it has read all of them."""
    if len(body) <= LARGE_JSON:
        return {}
    commas = body.count(",") if isinstance(body, str) else body.count(b",")
    return {"parse_float": _number} | ({"parse_int": _integer} if commas > MANY_NUMBERS else {})


def _number(text: str) -> float:
    return float(text)


def _integer(text: str) -> int:
    return int(text)


def label(name: str) -> str:
    """A caller's name for an error's `param`: in ASCII, cut after MAX_LABEL characters."""
    short = name if len(name) <= MAX_LABEL else f"{name[:MAX_LABEL]}..."
    return short if short.isascii() else ascii(short)[1:-1]


def likely(name: str, names: Iterable[str]) -> str | None:
    """The name among `names` that was probably meant; None without a close one."""
    return next(iter(difflib.get_close_matches(name, names, 1)), None) if len(name) <= MAX_LABEL else None


def unknown_field(name: str, fields: Iterable[str]) -> InvalidTask:
    near = likely(name, fields)
    hint = f"; did you mean {shown(near)}?" if near else f"; a task has {', '.join(fields)}"
    return InvalidTask(f"unknown field {shown(name)}{hint}", param=label(name), code="unknown_parameter")


def too_many(name: str, value: Any, fields: Mapping[str, FieldInfo]) -> InvalidTask:
    """The error for a list or an object of too many entries."""
    return InvalidTask(
        ErrorText.of(
            "{} is {}; {} must be {}", FieldName(name), shown(value), FieldName(name), fields[name].description
        ),
        param=name,
    )


def refusal(error: ValidationError, fields: Mapping[str, FieldInfo]) -> InvalidTask:
    """Pydantic's first error as an InvalidTask."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidTask):
        return cause
    field = str(first["loc"][0])
    expected = fields[field].description
    if first["type"] == "missing":
        return InvalidTask(
            ErrorText.of("{} is missing: {}", FieldName(field), expected), param=field, code="missing_parameter"
        )
    path = ErrorText.of(
        "{}{}", FieldName(field), "".join(f"[{shown(part)}]" for part in first["loc"][1:] if part != "[key]")
    )
    if first["type"] == "string_unicode":
        return InvalidTask(
            ErrorText.of("{} is not valid Unicode: {} has a lone surrogate", path, shown(first["input"])), param=field
        )
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return InvalidTask(
        ErrorText.of("{} is {}; {} must be {}", path, shown(first["input"]), FieldName(field), expected),
        param=field,
        code=code,
    )


def _no_default(schema: dict[str, Any]) -> None:
    """Remove the schema's default: it marks a missing prompt and is not a valid one."""
    del schema["default"]


class Task(BaseModel):
    """One generation task. Types are not converted.

    Raises InvalidTask, which names the field, its value and its limits.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={
            "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}, {"required": ["kind", "input"]}]
        },
    )

    # A field's description completes "it must be ..." in the message that refuses it.
    model: str = Field(min_length=1, max_length=200, description="the name of a model, 1 to 200 characters")
    version: str | None = Field(
        None,
        exclude=True,
        min_length=1,
        max_length=64,
        description="an alias or a version of the model, 1 to 64 characters; also behind @ in model",
    )
    sticky: str | None = Field(
        None,
        exclude=True,
        min_length=1,
        max_length=512,
        description="1 to 512 characters; tasks with equal ones go to the same version where a model's are split",
    )
    prompt: Prompt = Field(
        (), description="text or a list of token ids; this or messages must be given", json_schema_extra=_no_default
    )
    messages: Messages | None = Field(
        None, description="a list of messages with role and content, in place of a prompt"
    )
    kind: Kind = Field("generate", description="generate, embed, classify, token_classify or rerank")
    # Before `input`, whose check asks for it.
    on_error: Literal["request", "item"] = Field(
        "request",
        description="what a text fails that is empty or too long, or has a token id that the model lacks: request, or "
        "item (itself alone); of another kind than generate",
    )
    input: Inputs = Field(
        (),
        description=f"a text, or a list of at most {MAX_TEXTS}, each text or a list of token ids; with a kind that "
        "generates nothing",
    )
    query: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_BYTES)] | None = Field(
        None, description="a text, to which those of input are ranked; of the kind rerank"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=MAX_INT32,
        description="an integer of at least 1, to which vectors' dimensions are cut; of the kind embed",
    )
    prompt_name: str | None = Field(
        None, min_length=1, max_length=200, description="the name of one of the model's prompts; of the kind embed"
    )
    aggregation_strategy: Aggregation = Field(
        "simple",
        description="none (each token by itself), simple (neighbours of one label together), first, average or max "
        "(words first), as in transformers; of the kind token_classify",
    )
    threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="a number from 0 to 1, the least score of a labelled part; of the kind token_classify",
    )
    truncate: bool = Field(
        False, description="true (texts that are too long are cut) or false; of another kind than generate"
    )
    max_tokens: int | None = sampling(
        "max_tokens", f"an integer from 0 to {MAX_INT32} (unset: as far as the context goes)"
    )
    min_tokens: int = sampling("min_tokens", ErrorText.of("an integer from 0 to {}, at most {max_tokens}", MAX_INT32))
    temperature: float | None = sampling("temperature")
    top_k: int | None = sampling("top_k")
    top_p: float | None = sampling("top_p")
    min_p: float | None = sampling("min_p")
    typical_p: float | None = sampling("typical_p")
    repetition_penalty: float | None = sampling("repetition_penalty")
    presence_penalty: float = sampling("presence_penalty")
    frequency_penalty: float = sampling("frequency_penalty")
    logit_bias: Biases = sampling("logit_bias")
    allowed_token_ids: Ids = sampling(
        "allowed_token_ids", "a list of at most 4096 token ids, of which banned_token_ids leaves some"
    )
    banned_token_ids: Ids = sampling("banned_token_ids")
    bad_words: Texts = sampling("bad_words")
    json_schema: Schema | None = sampling("json_schema", f"a JSON schema: an object of at most {MAX_SCHEMA} characters")
    open_objects: bool = Field(
        False, description="true (JSON objects may have members that their schema does not name) or false"
    )
    regex: Regex | None = sampling("regex", f"a regular expression of 1 to {MAX_REGEX} characters")
    grammar: Lark | None = sampling("grammar", f"a Lark grammar of 1 to {MAX_GRAMMAR} characters")
    choice: Choice = sampling("choice")
    watermark: Watermark | None = sampling("watermark")
    seed: int | None = sampling("seed")
    stop: Annotated[tuple[Text, ...], BeforeValidator(stops, json_schema_input_type=Text | list[Text])] = sampling(
        "stop", "a string, or a list of at most 16, each of 1 to 256 characters"
    )
    stop_token_ids: Ids = sampling("stop_token_ids")
    include_stop: bool = sampling("include_stop", "true (the text keeps the stop string that ended it) or false")
    ignore_eos: bool = sampling("ignore_eos")
    n: int = sampling("n")
    best_of: int | None = sampling("best_of", f"an integer from n to {MAX_CHOICES}")
    beam_width: int | None = sampling("beam_width", f"an integer from n to {MAX_BEAMS}")
    length_penalty: float = sampling("length_penalty")
    early_stopping: EarlyStopping = sampling("early_stopping")
    logprobs: int | None = sampling("logprobs")
    prompt_logprobs: int | None = sampling("prompt_logprobs")
    tier: Annotated[Tier, BeforeValidator(known_tier)] = Field(
        "default", description="auto, priority, default, flex or batch"
    )
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description=f"seconds, above 0 and up to {MAX_TIMEOUT_S} (7 days)"
    )
    tenant: str | None = Field(
        None, min_length=1, max_length=MAX_TENANT, description=f"a name of 1 to {MAX_TENANT} characters"
    )
    order_key: str | None = Field(
        None,
        max_length=MAX_ORDER_KEY,
        pattern="^[!-~]+$",
        description=f"1 to {MAX_ORDER_KEY} visible ASCII characters, and needs a broker with FIFO queues",
    )
    metadata: dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ] = Field(
        default_factory=dict,
        max_length=16,
        description="at most 16 strings by name; a name has 1 to 64 characters, a string at most 512",
    )
    webhook: OwnWebhook | None = Field(
        None, exclude=True, description="an object with a url, and optionally a secret and events"
    )
    adapter: str | None = Field(
        None,
        pattern="^[0-9a-f]{12}$",
        description="the version of the adapter that the model names; unset: the present one",
    )
    ttl: int | None = Field(
        None, ge=60, le=MAX_TTL_S, description=f"seconds that the result is kept, from 60 to {MAX_TTL_S} (30 days)"
    )

    if not TYPE_CHECKING:  # type checkers go on seeing the fields as the constructor's parameters

        def __init__(self, /, **fields: Any) -> None:
            # By hand, and before all else: pydantic lists every name that it does not know.
            unknown = next((name for name in fields if name not in Task.model_fields), None)
            if unknown is not None:
                raise unknown_field(unknown, type(self).model_fields)
            # What is null was left out, but for what has to be there.
            needed = {"model", "prompt"}
            if fields.get("messages") is not None or fields.get("kind") not in (None, "generate"):
                needed = {"model"}
            values = {k: v for k, v in fields.items() if v is not None or k in needed}
            if isinstance(model := values.get("model"), str) and "@" in model:
                _part_version(values)
            for name, value in values.items():
                # Checked here, too: pydantic lists every wrong entry before it looks how many there are.
                if name in MAX_ENTRIES and isinstance(value, list | tuple | Mapping) and len(value) > MAX_ENTRIES[name]:
                    raise too_many(name, value, type(self).model_fields)
            try:
                super().__init__(**values)
                return
            except ValidationError as error:
                refused = refusal(error, type(self).model_fields)
            # Raised outside `except`, so that the ValidationError is not its context. That Rust object holds the
            # validator's exception invisibly to the garbage collector: such a cycle would never be freed.
            raise refused

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "generate":
            self._check_input()
            return self
        if misplaced := [name for name in OF_INPUT if not _is_default(self, name)]:
            kinds = [kind for kind, fields in _OF_KIND.items() if misplaced[0] in fields]
            listed = f"{', '.join(kinds[:-1])} or {kinds[-1]}" if len(kinds) > 1 else kinds[0]
            raise InvalidTask(
                ErrorText.of("{} goes with kind {}, and this task's kind is generate", FieldName(misplaced[0]), listed),
                param=misplaced[0],
            )
        if self.messages is None and not self.prompt:
            raise InvalidTask(
                ErrorText.of("{prompt} is missing: text or a list of token ids; or give {messages}"),
                param="prompt",
                code="missing_parameter",
            )
        if self.messages is not None and self.prompt:
            raise InvalidTask(
                ErrorText.of("{prompt} and {messages} are both given; a task has one of them"), param="messages"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidTask(
                ErrorText.of("{min_tokens} is {}, more than {max_tokens} ({})", self.min_tokens, self.max_tokens),
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidTask(
                ErrorText.of("{best_of} is {}, less than {n} ({})", self.best_of, self.n), param="best_of"
            )
        if wrong := misused_beams({name: getattr(self, name) for name in OF_BEAMS}):
            raise InvalidTask(wrong[0], param=wrong[1])
        if self.allowed_token_ids and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise InvalidTask(
                ErrorText.of("{allowed_token_ids} has no token that {banned_token_ids} does not ban"),
                param="allowed_token_ids",
            )
        if len(forms := [name for name in FORMS if getattr(self, name) not in (None, ())]) > 1:
            raise InvalidTask(
                ErrorText.of("{} and {} are both given; an output has one form", *map(FieldName, forms[:2])),
                param=forms[1],
            )
        if forms and (why := too_large(forms[0], getattr(self, forms[0]), self.width)):
            raise InvalidTask(why, param=forms[0], code="form_too_large")
        return self

    def _check_input(self) -> None:
        """Raise InvalidTask for fields that do not go with a kind that generates nothing."""
        fields, given = type(self).model_fields, self.model_fields_set - _OF_KIND[self.kind]
        different = (
            name for name in given if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        )
        if misplaced := sorted(name for name in different if not fields[name].exclude):
            raise InvalidTask(
                ErrorText.of("{} does not go with kind {}", FieldName(misplaced[0]), self.kind), param=misplaced[0]
            )
        if self.n != 1:
            raise InvalidTask(ErrorText.of("{n} is {}; with kind {} it is 1", self.n, self.kind), param="n")
        if not self.input:
            raise InvalidTask(
                ErrorText.of("{input} is missing: a text, or a list of texts or of lists of token ids"),
                param="input",
                code="missing_parameter",
            )
        if self.kind not in ("rerank", "token_classify"):
            return
        if self.kind == "rerank" and self.query is None:
            raise InvalidTask(
                ErrorText.of("{query} is missing: the text to rank by"), param="query", code="missing_parameter"
            )
        if not all(isinstance(item, str) for item in self.input):
            told = "documents to rank are texts" if self.kind == "rerank" else "parts of texts are labelled: give texts"
            raise InvalidTask(ErrorText.of("{input} has token ids; {}", told), param="input", code="invalid_type")
        if self.query is None:
            return
        if "\0" in self.query:
            raise InvalidTask(ErrorText.of("{query} has a NUL character"), param="query")
        if (size := len(self.query.encode()) * len(self.input)) > MAX_TEXTS_BYTES:
            raise InvalidTask(
                ErrorText.of(
                    "{query} has {} bytes, and is read with each of {} documents; at most {} are taken in all",
                    size // len(self.input),
                    len(self.input),
                    MAX_TEXTS_BYTES,
                ),
                param="query",
            )

    @classmethod
    def parse(cls, fields: Any) -> Self:
        """A task from parsed JSON. Raises InvalidTask, also if it is not an object."""
        if not isinstance(fields, Mapping):
            raise InvalidTask(f"a task is a JSON object, not {shown(fields)}", code="invalid_type")
        return cls(**{str(name): value for name, value in fields.items()})

    @classmethod
    def parse_json(cls, body: str | bytes) -> Self:
        """A task from JSON text. Raises InvalidTask, also if it is not UTF-8 or not JSON."""
        return cls.parse(read_json(body))

    def to_json(self, *, texts: bool = True) -> str:
        """The task as JSON for its record, without defaults, its webhook and what decides its version, which have
        fields of their own.

        `texts`: False leaves the texts out, which a parent's chunks have.
        """
        return self.model_dump_json(exclude_defaults=True, exclude=None if texts else {"input"})

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt's length, if it came as token ids; else None."""
        if self.kind != "generate":
            lengths = [len(item) for item in self.input if not isinstance(item, str)]
            return sum(lengths) if len(lengths) == len(self.input) else None
        return None if isinstance(self.prompt, str) or self.messages is not None else len(self.prompt)

    @property
    def has_token_ids(self) -> bool:
        """Whether some of it means something to one tokenizer alone."""
        ids = (self.stop_token_ids, self.allowed_token_ids, self.banned_token_ids, self.logit_bias)
        if self.kind != "generate":
            return not all(isinstance(item, str) for item in self.input)
        return self.prompt_tokens is not None or any(ids)

    @property
    def form(self) -> str | None:
        """Which of FORMS its outputs have; None for no form."""
        return next((name for name in FORMS if getattr(self, name) not in (None, ())), None)

    @property
    def width(self) -> int:
        """Number of choices that are generated, of which `n` are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def level(self) -> int:
        """The level of its worker's release that it needs (`producers.contract.levels`); 0 if it needs none."""
        return levels.level_of(self.model_dump(exclude_defaults=True)) if levels.FEATURES else 0

    def kv_tokens(self, context_length: int) -> int:
        """KV tokens that the task may need, estimated without a tokenizer: the prompt once, the output per choice. Of a
        task that generates nothing, the tokens of its texts."""
        if self.kind != "generate":
            query = len((self.query or "").encode())
            return sum(
                min(context_length, -(-(len(item.encode()) + query) // BYTES_PER_TOKEN) + _AROUND)
                if isinstance(item, str)
                else len(item)
                for item in self.input
            )
        prompt = self.prompt_tokens
        if prompt is None:
            text = str(self.prompt).encode() if self.messages is None else json_of(self.messages)
            prompt = -(-len(text) // BYTES_PER_TOKEN)
        output = ASSUMED_OUTPUT if self.max_tokens is None else self.max_tokens
        return min(prompt + output * self.width, context_length * self.width)

    def check(self, card: Mapping[str, Any], *, counted: bool = True) -> None:
        """Raise InvalidTask if the model of this card (`engine.text.card`) cannot run the task.

        `counted`: False where the prompt's tokens are yet to be counted: then its length is checked later, so that an
        error names true numbers.
        """
        context, vocabulary = int(card["context_length"]), int(card["vocab_size"])
        if self.kind not in card["capabilities"]:
            able = " and ".join(card["capabilities"]) or "nothing of this"
            raise InvalidTask(
                f"model {shown(self.model)} cannot {self.kind}; it can {able}",
                param="model",
                code="unsupported_model",
            )
        if self.kind != "generate":
            self._check_texts(card, context, vocabulary)
            return
        current = card.get("adapter", {}).get("version")
        if self.adapter is not None and self.adapter != current:
            has = "has no adapter" if current is None else f"has the adapter version {current}"
            raise InvalidTask(
                ErrorText.of("{adapter} is {}, and model {} {}", self.adapter, shown(self.model), has), param="adapter"
            )
        if self.messages is not None and "chat" not in card["capabilities"]:
            raise InvalidTask(
                ErrorText.of("model {} has no chat template; give a prompt in place of {messages}", shown(self.model)),
                param="messages",
                code="unsupported_model",
            )
        if not isinstance(self.prompt, str) and max(self.prompt, default=0) >= vocabulary:
            raise InvalidTask(
                ErrorText.of(
                    "{prompt} has token id {}; {} has ids 0 to {}", max(self.prompt), shown(self.model), vocabulary - 1
                ),
                param="prompt",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
            highest = max(getattr(self, name), default=0)
            if highest >= vocabulary:
                raise InvalidTask(
                    ErrorText.of(
                        "{} has {}; {} has ids 0 to {}", FieldName(name), highest, shown(self.model), vocabulary - 1
                    ),
                    param=name,
                )
        if len(set(self.banned_token_ids)) >= vocabulary:
            raise InvalidTask(
                ErrorText.of("{banned_token_ids} bans all tokens of {}", shown(self.model)), param="banned_token_ids"
            )
        self._check_watermark(card.get("watermark"))
        if counted:
            self._check_length(card, context)

    def _check_watermark(self, keys: Mapping[str, Any] | None) -> None:
        """Raise InvalidTask if workers cannot, or may not, do as the task says. `keys`: the card's `watermark`."""
        if self.watermark is None:
            if self.beam_width is not None and keys is not None and keys["default"] is not None:
                raise InvalidTask(
                    ErrorText.of(
                        "{beam_width} finds outputs that bear no watermark, and model {} marks its own unless "
                        "{watermark} is false",
                        shown(self.model),
                    ),
                    param="beam_width",
                )
            return
        if self.watermark is False:
            why = REQUIRED if keys and keys["default"] is not None and not keys["optional"] else ""
        else:
            why = NO_KEYS if keys is None else "" if self.watermark in keys["keys"] else has_keys(keys["keys"])
        if why:
            shown_value = "false" if self.watermark is False else shown(self.watermark)
            raise InvalidTask(ErrorText.of("{watermark} is {}; {}", shown_value, why), param="watermark")

    def _check_texts(self, card: Mapping[str, Any], context: int, vocabulary: int) -> None:
        """Raise InvalidTask if the model of this card cannot make what is asked of the texts."""
        for at, item in enumerate(self.input):
            if isinstance(item, str) or self.on_error == "item":
                continue
            if (highest := max(item)) >= vocabulary:
                raise InvalidTask(
                    ErrorText.of(
                        "{input}[{}] has token id {}; {} has ids 0 to {}",
                        at,
                        highest,
                        shown(self.model),
                        vocabulary - 1,
                    ),
                    param="input",
                )
            if len(item) > context and not self.truncate:
                raise InvalidTask(
                    ErrorText.of(
                        "{input}[{}] has {} tokens; {} takes {}; shorten it, or give truncate: true",
                        at,
                        len(item),
                        shown(self.model),
                        context,
                    ),
                    param="input",
                    code="context_length_exceeded",
                )
        pooling = card.get("pooling") or {}
        width = self._width(card)
        if self.dimensions is not None:
            self._check_dimensions(width, pooling.get("matryoshka") or False)
            width = self.dimensions
        if self.prompt_name is not None and self.prompt_name not in (prompts := pooling.get("prompts") or {}):
            raise InvalidTask(
                ErrorText.of(
                    "{prompt_name} is {}; {} has the prompts {}",
                    shown(self.prompt_name),
                    shown(self.model),
                    ", ".join(map(shown, prompts)) or "none",
                ),
                param="prompt_name",
            )
        if self.kind == "token_classify" and self.result_bytes(card) > MAX_TEXTS_RESULT:
            raise InvalidTask(
                ErrorText.of(
                    "{input} has {} texts, whose labelled parts may take {} bytes; at most {} are taken in one request",
                    len(self.input),
                    self.result_bytes(card),
                    MAX_TEXTS_RESULT,
                ),
                param="input",
                code="array_above_max_length",
            )
        if self.result_bytes(card) > MAX_TEXTS_RESULT:
            most = MAX_TEXTS_RESULT * 3 // (16 * width)
            raise InvalidTask(
                ErrorText.of(
                    "{input} has {} texts: with {} numbers each, at most {} are taken in one request",
                    len(self.input),
                    width,
                    most,
                ),
                param="input",
                code="array_above_max_length",
            )

    @staticmethod
    def _width(card: Mapping[str, Any]) -> int:
        """The numbers that the model of this card makes of a text."""
        pooling = card.get("pooling") or {}
        return int(pooling.get("dimensions") or len(pooling.get("labels") or ()) or 1)

    def result_bytes(self, card: Mapping[str, Any]) -> int:
        """The bytes of a result of the model of this card, as stored: numbers of 4 bytes in base64. Of labelled parts
        the most that there may be, one a token."""
        if self.kind != "token_classify":
            return len(self.input) * (self.dimensions or self._width(card)) * 4 * 4 // 3
        return sum(self._label_bytes(item, card) for item in self.input)

    @staticmethod
    def _label_bytes(item: str | tuple[int, ...], card: Mapping[str, Any]) -> int:
        """The same of one text's labelled parts, each with 4 numbers. A token has at least one byte of text."""
        pooling = card.get("pooling") or {}
        labels = len(pooling.get("labels") or ()) if pooling.get("several_labels") else 1
        return min(MAX_ENTITIES, labels * min(int(card["context_length"]), _bytes_of(item))) * 4 * 4 * 4 // 3

    def chunks(self, card: Mapping[str, Any]) -> list[range]:
        """The texts' numbers in chunks that a worker of this card's model takes at once: one if it takes all of them.

        Each has up to MAX_INPUTS texts of MAX_PROMPT_BYTES, also with the query that is read with each, and a result of
        up to MAX_RESULT_BYTES.
        """
        if self.kind == "generate":
            return [range(0)]
        labels = self.kind == "token_classify"
        limit = MAX_INPUTS
        if not labels:
            limit = min(limit, max(1, MAX_RESULT_BYTES * len(self.input) // self.result_bytes(card)))
        if query := len((self.query or "").encode()):
            limit = min(limit, max(1, MAX_PROMPT_BYTES // query))
        chunks, start, size, result = [], 0, 0, 0
        for at, item in enumerate(self.input):
            own, made = _bytes_of(item), self._label_bytes(item, card) if labels else 0
            full = size + own > MAX_PROMPT_BYTES or result + made > MAX_RESULT_BYTES
            if at - start == limit or (at > start and full):
                chunks.append(range(start, at))
                start, size, result = at, 0, 0
            size, result = size + own, result + made
        return [*chunks, range(start, len(self.input))]

    def check_at_once(self, card: Mapping[str, Any]) -> None:
        """Raise InvalidTask if it has more texts than a worker takes at once: for senders that make no chunks."""
        if len(chunks := self.chunks(card)) > 1:
            raise InvalidTask(
                ErrorText.of(
                    "{input} has {} texts; here at most {} are taken at once, with {} bytes and a result of {} bytes: "
                    "give the first {}",
                    len(self.input),
                    MAX_INPUTS,
                    MAX_PROMPT_BYTES,
                    MAX_RESULT_BYTES,
                    len(chunks[0]),
                ),
                param="input",
                code="array_above_max_length",
            )

    def _check_dimensions(self, width: int, matryoshka: Any) -> None:
        """Raise InvalidTask if vectors of `width` dimensions may not be cut to those that are asked for."""
        requested = self.dimensions or width
        if requested == width or (requested < width and matryoshka is True):
            return
        if isinstance(matryoshka, list) and requested in matryoshka:
            return
        may = (
            f"be cut to {', '.join(map(str, matryoshka))}"
            if isinstance(matryoshka, list)
            else f"be cut to 1 to {width}"
            if matryoshka
            else "not be cut (no Matryoshka)"
        )
        raise InvalidTask(
            ErrorText.of(
                "{dimensions} is {}; vectors of {} have {} and may {}", requested, shown(self.model), width, may
            ),
            param="dimensions",
        )

    def _check_length(self, card: Mapping[str, Any], context: int) -> None:
        """Raise InvalidTask if prompt and output do not fit. A text's tokens are not counted: it has one at least."""
        prompt, least = self.prompt_tokens or 1, "" if self.prompt_tokens else "at least "
        output = max(self.min_tokens, 1) if self.max_tokens is None else self.max_tokens
        self._check_size(prompt, context)
        if prompt + output > context:
            # OpenAI's words: clients recognise an overflow by the message's beginning and shorten the conversation.
            raise InvalidTask(
                ErrorText.of(
                    "This model's maximum context length is {} tokens. However, you requested {}{} tokens "
                    "({}{} in the prompt, {} in the completion). Shorten the prompt, lower {max_tokens}, or use a "
                    "model with more context than {}.",
                    context,
                    least,
                    prompt + output,
                    least,
                    prompt,
                    output,
                    shown(self.model),
                ),
                param="prompt" if prompt >= context else "max_tokens",
                code="context_length_exceeded",
            )
        # The last token of an output needs no place in the KV cache.
        capacity, needed = int(card.get("kv_capacity", context)), max(prompt, prompt + output - 1)
        if needed > capacity:
            raise InvalidTask(
                ErrorText.of(
                    "prompt and output need {} tokens of KV cache; the workers of {} have room for {}; shorten the "
                    "prompt, lower {max_tokens} or serve with a larger KV cache",
                    needed,
                    shown(self.model),
                    capacity,
                ),
                param="prompt" if prompt > capacity else "max_tokens",
                code="kv_capacity_exceeded",
            )

    def _check_size(self, prompt: int, context: int) -> None:
        """Raise InvalidTask if the task would store too much at once."""
        if self.prompt_logprobs is not None and (count := (self.prompt_logprobs + 1) * prompt) > MAX_PROMPT_LOGPROBS:
            raise InvalidTask(
                ErrorText.of(
                    "{prompt_logprobs} is {}: with {} prompt tokens these are {} log probabilities; at most {} are "
                    "given",
                    self.prompt_logprobs,
                    prompt,
                    count,
                    MAX_PROMPT_LOGPROBS,
                ),
                param="prompt_logprobs",
            )
        # Without max_tokens, `resolved` sets the most that is allowed.
        output = self.min_tokens if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None and (count := (self.logprobs + 1) * output * self.n) > MAX_LOGPROBS:
            raise InvalidTask(
                ErrorText.of(
                    "{logprobs} is {}: with {n} = {} and up to {} output tokens these are {} log probabilities; at "
                    "most {} are given; lower {max_tokens}, {n} or {logprobs}",
                    self.logprobs,
                    self.n,
                    output,
                    count,
                    MAX_LOGPROBS,
                ),
                param="logprobs",
            )
        output = context - prompt if self.max_tokens is None else self.max_tokens
        if (self.beam_width or self.width > self.n) and self.n * output > MAX_BEST_TOKENS:
            name = "best_of" if self.beam_width is None else "beam_width"
            raise InvalidTask(
                ErrorText.of(
                    "{} is {}: {} choices of up to {} tokens are more than the {} tokens that are given at "
                    "once; lower {max_tokens} or {n}",
                    FieldName(name),
                    self.width,
                    self.n,
                    output,
                    MAX_BEST_TOKENS,
                ),
                param=name,
            )

    def formed(self) -> Self:
        """The task with the form that its record keeps: a JSON schema whose outputs end (`engine.grammar.schema`), and
        a choice as a grammar, as which workers of all releases know it.

        A schema for which that is too much, or that would be larger than it may be, is followed to the letter.
        """
        if self.choice:
            return self.model_copy(update={"grammar": grammar_of(self.choice), "choice": (), "open_objects": False})
        if self.json_schema is not None and rules_of(self.json_schema) is not None and not self.open_objects:
            return self
        if self.json_schema is None:
            return self.model_copy(update={"open_objects": False}) if self.open_objects else self
        schema = bounded(self.json_schema, open_objects=self.open_objects).schema
        if rules_of(schema) is None or not self._may_have(schema):
            marked = to_the_letter(self.json_schema)
            schema = marked if self._may_have(marked) else self.json_schema
        return self.model_copy(update={"json_schema": schema, "open_objects": False})

    def _may_have(self, schema: Mapping[str, Any]) -> bool:
        """Whether a schema is short and small enough for the task's outputs."""
        long = len(json.dumps(schema, ensure_ascii=False)) > MAX_SCHEMA
        return not (long or too_large("json_schema", schema, self.width))

    def resolved(self, card: Mapping[str, Any]) -> Self:
        """The task as the worker will run it: checked, with the card's defaults, a seed and the schema that its outputs
        follow. Raises InvalidTask."""
        self.check(card)
        if self.kind != "generate":
            return self
        update = filled({name: getattr(self, name) for name in (*DEFAULTS, "beam_width")}, card.get("defaults", {}))
        if "adapter" in card:
            update["adapter"] = card["adapter"]["version"]
        if (formed := self.formed()) is not self:
            update |= {name: getattr(formed, name) for name in (*FORMS, "open_objects")}
        if self.watermark is None and "watermark" in card:
            update["watermark"] = card["watermark"]["default"]
        if self.seed is None:
            update["seed"] = secrets.randbits(63)
        if self.max_tokens is None and self.logprobs is not None:
            limit = MAX_LOGPROBS // ((self.logprobs + 1) * self.n)
            if limit < int(card["context_length"]) - (self.prompt_tokens or 1):
                update["max_tokens"] = max(1, limit)
        return self.model_copy(update=update)


def _part_version(values: dict[str, Any]) -> None:
    """Part `model@version` in a task's fields. Raises InvalidTask where a version is given beside it."""
    model, _, version = str(values["model"]).partition("@")
    if values.get("version", version) != version:
        raise InvalidTask(
            f"model is {shown(values['model'])}, and version is {shown(values['version'])}; give one of them",
            param="version",
        )
    values |= {"model": model, "version": version}


#: Field -> the most entries of its list or object.
MAX_ENTRIES: Final[Mapping[str, int]] = {
    name: bound.max_length
    for name, field in Task.model_fields.items()
    for bound in field.metadata
    if isinstance(bound, MaxLen) and field.annotation not in (str, str | None)
}
