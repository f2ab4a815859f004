"""Types of a task's fields, with their limits, and the errors for what a caller gave in their place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo

from engine.declared import MAX_INT32, Integer, JsonObject, Number, Strings, TokenIds, declared
from engine.declared import Biases as BiasesBound
from engine.declared import Text as TextBound
from engine.errors import ErrorText, FieldName, RequestError, renamed
from engine.params import (
    DEFAULTS,
    MAX_TEXT,
    SamplingParams,
)
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
#: The same limits of a task in chunks (`producers.store.chunks`): texts, their bytes, and the bytes of its result.
MAX_TEXTS: Final = 10_000
MAX_TEXTS_BYTES: Final = 16 << 20
#: Characters of JSON, and numbers in it, above which the interpreter is given up now and then while they are read.
LARGE_JSON: Final = 64 * 1024
MANY_NUMBERS: Final = 1 << 18
#: Longest name (characters) in an error's `param`; longer ones are cut and get no spelling hint.
MAX_LABEL: Final = 64
DECIMAL: Final = re.compile("0|[1-9][0-9]{0,9}")
_BIASES: Final[Any] = declared(SamplingParams)["logit_bias"].bound
_STOPS: Final[Any] = declared(SamplingParams)["stop"].bound


def check_prompt(value: Any) -> Any:
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
            checked_item = (item if isinstance(item, str) else ()) if empty else check_prompt(item)
        except InvalidTask as error:
            named = renamed(error.message, {"prompt": ErrorText.of("{input}[{}]", at)})
            raise InvalidTask(named, param="input", code=error.code) from None
        if isinstance(checked_item, str) and "\0" in checked_item:
            raise InvalidTask(ErrorText.of("{input}[{}] has a NUL character", at), param="input")
        if (item_bytes := bytes_of(checked_item)) > MAX_PROMPT_BYTES:
            raise InvalidTask(
                ErrorText.of(
                    "{input}[{}] has {} bytes (4 a token id); at most {} are taken", at, item_bytes, MAX_PROMPT_BYTES
                ),
                param="input",
            )
        size += item_bytes
        inputs.append(checked_item)
    if size > MAX_TEXTS_BYTES:
        raise InvalidTask(
            ErrorText.of(
                "{input} has {} bytes (4 a token id); at most {} are taken in one request", size, MAX_TEXTS_BYTES
            ),
            param="input",
        )
    return tuple(inputs)


def bytes_of(item: str | Sequence[int]) -> int:
    """A text's bytes, as they count for limits: 4 a token id."""
    return len(item.encode()) if isinstance(item, str) else 4 * len(item)


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
#: A prompt's JSON schema, for OpenAPI; `check_prompt` enforces it.
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
Prompt = Annotated[str | tuple[int, ...], BeforeValidator(check_prompt, json_schema_input_type=PromptText | PromptIds)]


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
