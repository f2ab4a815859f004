"""A task as a caller writes it, and its validation at the edge.

A refused task is never queued. The limits of sampling are those that `engine.params.SamplingParams` declares, so that
no worker refuses an accepted task.

    a caller's JSON -> types of fields (`fields`) -> Task: checked, then by a model's card (`model_fit`) -> its record
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from engine.declared import MAX_INT32
from engine.errors import ErrorText, FieldName
from engine.grammar.schema import bounded, rules_of, to_the_letter
from engine.labels import Aggregation
from engine.params import (
    DEFAULTS,
    FORMS,
    MAX_BEAMS,
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_REGEX,
    MAX_SCHEMA,
    OF_BEAMS,
    filled,
    grammar_of,
    misused_beams,
    too_large,
)
from producers.contract import levels, model_fit
from producers.contract.fields import (
    MAX_ORDER_KEY,
    MAX_PROMPT_BYTES,
    MAX_TENANT,
    MAX_TEXTS,
    MAX_TEXTS_BYTES,
    MAX_TIMEOUT_S,
    MAX_TTL_S,
    Biases,
    Choice,
    EarlyStopping,
    Ids,
    Inputs,
    Kind,
    Lark,
    Messages,
    OwnWebhook,
    Prompt,
    Regex,
    Schema,
    Text,
    Texts,
    Tier,
    Watermark,
    json_of,
    known_tier,
    read_json,
    refusal,
    sampling,
    stops,
    too_many,
    unknown_field,
)
from producers.contract.model_fit import MAX_LOGPROBS
from producers.errors import InvalidTask, shown

#: Estimated bytes a token of text, which overestimates the tokens of most texts.
BYTES_PER_TOKEN: Final = 3
#: Assumed output tokens of a task without max_tokens.
ASSUMED_OUTPUT: Final = 256
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
#: Special tokens around a text, as many as most models have.
_AROUND: Final = 2


def _is_default(task: Task, name: str) -> bool:
    return bool(getattr(task, name) == Task.model_fields[name].get_default(call_default_factory=True))


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
        fields, set_fields = type(self).model_fields, self.model_fields_set - _OF_KIND[self.kind]
        different = (
            name for name in set_fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)
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
            rule = "documents to rank are texts" if self.kind == "rerank" else "parts of texts are labelled: give texts"
            raise InvalidTask(ErrorText.of("{input} has token ids; {}", rule), param="input", code="invalid_type")
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
        """The name in FORMS of its outputs' form; None for no form."""
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
        model_fit.check(self, card)
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
