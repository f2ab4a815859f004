"""The nouns: a Request comes in, its choices run as Sequences, Events and Outputs go out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.kv.table import Table
    from engine.output import OutputState
    from engine.prompt_scores import PromptScores
    from engine.shares import Account
    from engine.speculate.guessed import Guessed

FinishReason = Literal["stop", "length", "abort", "error"]


class Tier(IntEnum):
    """Lower runs first. The names are those of OpenAI's `service_tier`."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


@dataclass(slots=True)
class Request:
    """What a caller asks for: a prompt in tokens and how to go on from it."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    tier: int = Tier.DEFAULT
    salt: str = ""
    """Tenant's salt of the block hashes: requests share cached blocks only where it is equal."""
    tenant: str = ""
    """Whose share of its tier it is served from."""
    weight: float = 1.0
    """The tenant's: one of weight 2 is served twice the tokens of one of weight 1, where both have enough to do."""
    adapter: str = ""
    resume: list[list[int]] = field(default_factory=list)
    """Per choice, the tokens that were already published; choices past the end of the list have none."""
    arrival: float = field(default_factory=time.monotonic)
    """Monotonic seconds; orders requests of one tier and starts their ageing."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution: temperature 1, before any filter."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest tokens, likeliest first."""


@dataclass(slots=True)
class Event:
    """The news of one choice after one step. Not to be changed.

    It is not frozen because a step makes one for each sequence, and making a frozen one takes three times as long.
    """

    request_id: str
    choice: int
    index: int
    """Place of the first of token_ids in the choice's output."""
    token_ids: list[int]
    texts: list[str]
    """One piece for each token, "" where a character or a possible stop string is not yet decided."""
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_match: str | int | None
    """The stop string or token that ended the choice."""
    done: bool
    """True on the last event of the request: all of its choices have finished."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed because their KV was cached."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, the first None: all in one event, before those of the first tokens."""
    discarded: int = 0
    """Tokens of the candidates that best_of did not choose."""
    refused: bool = False
    """`error` is the request's own fault: trying again would not help."""


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Output:
    """All of a request's outcome; the fields beside `choices` are those of choice 0."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    prompt_tokens: int
    cached_tokens: int
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


#: Stands in a sequence's tokens for one that is not known yet. No token id: it cannot be hashed.
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request while it lives: the object that scheduler, plan and runner share.

    The K/V of tokens[:computed] are in the cache, as far as later queries see them, where `tables` say.
    """

    request: Request
    choice: int
    tokens: list[int]
    """Prompt and output."""
    prompt_len: int
    output: OutputState
    seed: int
    """Of the request: its own, or drawn when it was added."""
    serial: int
    """Order of creation; breaks ties of arrival."""
    queued_at: float
    """When it last began to wait."""
    slot: int = -1
    """Permanent row, 0 to max_num_seqs - 1, while running."""
    computed: int = 0
    pending: bool = False
    """The last of tokens is UNKNOWN: the step in flight samples it. Only while the step after that one is planned."""
    tables: list[Table] = field(default_factory=list)
    """One for each KV group while it runs, else none."""
    room: int = 0
    """Tokens up to which every table has a place."""
    status: Status = Status.WAITING
    waited: float = 0.0
    """Seconds of waiting that have ended; the present wait runs from queued_at."""
    effective_tier: int = Tier.BATCH
    """Tier less ageing, as of its last admission."""
    account: Account | None = None
    """Its tenant's, in the tier that it waits or runs in; none before its prompt is computed by another choice."""
    tag: float = 0.0
    """What its tenant had been served when it was first admitted in that tier: its place in the batch."""
    paid: int = 0
    """Tokens up to which its tenant was charged."""
    preempted: bool = False
    """Waiting because it was put out of the batch."""
    root: bytes = b""
    """Parent of the hash of its first block."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of tokens, as far as they were needed."""
    registered: int = 0
    """Leading blocks of its tokens that have been offered to the prefix cache."""
    scores: PromptScores | None = None
    """Where the log probabilities of the prompt are wanted."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The tokens of each way to write one of them."""
    guessed: Guessed | None = None
    """How well its tokens were guessed, where they are."""

    @property
    def reusable(self) -> int:
        """Leading tokens whose K/V may come from the prefix cache: those after them are computed for their logits."""
        if self.scores is None or self.scores.done:
            return len(self.tokens) - 1
        return len(self.scores.found) - 1
