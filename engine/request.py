"""The caller's data types: a Request comes in; Events, and at the end an Output, go out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, Protocol

from engine.errors import TextError
from engine.labels import Aggregation, Entity, TokenSpan
from engine.params import FinishReason, SamplingParams

if TYPE_CHECKING:
    from engine.grammar.matcher import Matcher


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural log probability in the model's own distribution, before any parameter changes it."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The log probabilities of prompt tokens that one step computed."""

    first: int
    """The position in the prompt of the first token scored."""
    logprobs: list[TokenLogprobs]
    error: str | None = None
    """Set if the logits were not finite. `logprobs` is then empty."""


@dataclass(slots=True)
class PromptScores:
    """The log probabilities of one request's prompt, shared by all its choices. The choice that prefills fills them."""

    tokens: list[int]
    """The prompt's token ids."""
    top: int
    """The number of most likely tokens to report for each position."""
    entries: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """The log probabilities of the leading tokens so far. The first token has None, because nothing precedes it."""
    reported: bool = False
    """Whether the event with these log probabilities was made."""

    @property
    def done(self) -> bool:
        return len(self.entries) == len(self.tokens)

    def span_in(self, start: int, end: int) -> range:
        """The positions of [start, end) whose logits are wanted: each scores the token after it."""
        return range(max(start, len(self.entries) - 1), min(end, len(self.tokens) - 1))

    def take(self, part: ScoredPart) -> None:
        """Append a part. Positions that were known before keep their values."""
        self.entries += part.logprobs[len(self.entries) - part.first :]


class Tier(IntEnum):
    """The priority class of a request: a lower number runs first. The names are those of OpenAI's `service_tier`."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


#: Preemptions that a request remembers; later ones are counted.
REMEMBERED: Final = 8


@dataclass(slots=True)
class Course:
    """A request's course through the engine so far. The engine writes, others read. Times: monotonic seconds."""

    began_at: float | None = None
    """When the first step that computes some of it was planned."""
    cached_tokens: int = 0
    """Prompt tokens that it found in the prefix cache then."""
    running: int = 0
    """Its choices that run. While there are none, it waits: for its first step, or to go on after a preemption."""
    preemptions: int = 0
    preempted: list[tuple[float, str]] = field(default_factory=list)
    """When and why, of the first ones: `better_tier` (a request of a better tier needed the room), `kv_room` (those
    that ran had no KV block left), `memory` (a step was too large for the device), `recompute` (of its own)."""

    chunks: int = 0
    """Steps that computed some of its prompt."""
    engine_s: float = 0.0
    """Its part of the time (s) of steps, which is split by the tokens that each sequence had computed."""
    joules: float = 0.0
    """The same part of what the device drew in these steps, where a meter tells its power."""
    put_off_s: float = 0.0
    """Seconds in which none of its choices ran, from preemptions until it went on."""
    put_off_at: float | None = None
    """When it was preempted last; None once it has gone on."""
    computed: int = 0
    """Tokens of its texts that are done, if it generates nothing."""
    searched: int = 0
    """Tokens of the beams of a search, of which no event tells before the end."""

    def admit(self, now: float, cached_tokens: int) -> None:
        if self.began_at is None:
            self.began_at, self.cached_tokens = now, cached_tokens
        if self.put_off_at is not None and self.running <= 0:
            self.put_off_s += now - self.put_off_at
            self.put_off_at = None
        self.running += 1

    def preempt(self, now: float, why: str) -> None:
        self.preemptions += 1
        self.put_off_at = now
        if len(self.preempted) < REMEMBERED:
            self.preempted.append((now, why))


#: What a model without outputs of text can make: of a text a vector, the probabilities of labels or labelled parts, of
#: two a score.
PoolingKind = Literal["embed", "classify", "token_classify", "rerank"]


#: The result of a text: a vector, the probabilities of labels or a score; or its labelled parts.
TextRow = list[float] | tuple[Entity, ...]


@dataclass(frozen=True, slots=True)
class Pooling:
    """The texts of a request that generates nothing, and what is to be made of each."""

    kind: PoolingKind
    lengths: tuple[int, ...]
    """The tokens of each text; `prompt_ids` has those of all, one text after another."""
    seconds: tuple[int, ...] = ()
    """For each text that is a pair, the index of the second text's first token in it; () if none is a pair."""
    prompt_tokens: tuple[int, ...] = ()
    """For each text, the tokens at its beginning that are the model's prompt; () if none has one."""
    dimensions: int | None = None
    """The dimensions to which vectors are cut; None for all."""
    errors: Mapping[int, TextError] = field(default_factory=dict)
    """Texts that are not computed, by their numbers; they have no tokens. The others are."""
    spans: tuple[Sequence[TokenSpan | None], ...] = ()
    """For each text, the characters of its tokens, None for special ones; () if tokens are not labelled."""
    aggregation: Aggregation = "simple"
    threshold: float | None = None
    """The least score of an entity. None for all; if a token may have several labels, 0.5."""
    item_errors: bool = False
    """Whether a text of which nothing could be made, or too much, has that error in place of its row. Else the request
    fails."""


class LoadedAdapter(Protocol):
    """A loaded LoRA adapter (`engine.adapters`)."""

    @property
    def version(self) -> str:
        """It separates the cached blocks of different adapters."""


@dataclass(slots=True)
class Request:
    """A prompt as token ids, with its sampling parameters and scheduling attributes."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    tier: int = Tier.DEFAULT
    salt: str = ""
    """The tenant's salt of the block hashes. Requests share cached blocks only if their salts are equal."""
    tenant: str = ""
    """The tenant to whose share of the tier the request's tokens are charged."""
    weight: float = 1.0
    """The tenant's weight. While both have requests waiting, weight 2 is served twice the tokens of weight 1."""
    adapter: str = ""
    """The name of the LoRA adapter to use; "" for none."""
    resume: list[list[int]] = field(default_factory=list)
    """For each choice, the tokens that were already published. Choices past the end of the list have none."""
    taken_over: bool = False
    """Whether an earlier worker had computed its prompt, and the tokens in `resume`."""
    arrival: float = field(default_factory=time.monotonic)
    """The time of arrival in monotonic seconds. It orders requests of one tier and starts their ageing."""
    pooling: Pooling | None = None
    """Set if it generates nothing: `engine.pooling` serves it."""
    course: Course = field(default_factory=Course, compare=False)
    matchers: list[Matcher] = field(default_factory=list, compare=False, repr=False)
    """Those of its outputs' form, one for each choice, from when they were made until it is queued."""
    loaded: LoadedAdapter | None = field(default=None, compare=False, repr=False)
    """The adapter of that name, from when the request was checked. The request keeps it until it ends."""


@dataclass(slots=True)
class Event:
    """The new tokens, or the end, of one choice after one step. Callers must not change it.

    It is not frozen because a step makes one for each sequence, and making a frozen one takes three times as long.
    """

    request_id: str
    choice: int = 0
    index: int = 0
    """The position of token_ids[0] in the choice's output."""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """One piece of text for each token; "" while a character or a possible stop string is incomplete."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    """The stop string or stop token id that ended the choice."""
    done: bool = False
    """True on the last event of the request, when all of its choices have finished."""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were not computed because their K/V were cached."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry for each prompt token, the first None. All come in one event, before the first tokens' event."""
    discarded: int = 0
    """The number of tokens of the candidates that best_of did not choose."""
    refused: bool = False
    """Whether the request itself caused `error`, so that a retry would not help."""
    param: str | None = None
    """The parameter at fault then, where it is known."""
    code: str = "invalid_value"
    """The code of the refusal then, as that of a RequestError."""
    rows: list[TextRow | TextError] | None = None
    """On the only event of a request with `pooling`, for each of its texts, or its entry in `Pooling.errors`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of many requests, as columns: one row for each, in the order in which they came. None of them ends its
    choice, and none has log probabilities."""

    request_ids: list[str | None]
    """None: the row is nobody's."""
    choices: list[int]
    indices: list[int]
    """See Event."""
    token_ids: list[int]
    texts: list[str]


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Output:
    """The whole result of a request. The fields other than `choices` are those of choice 0."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    prompt_tokens: int
    cached_tokens: int
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    """Why the request failed, where a finish_reason is "error"."""
