"""The nouns that callers see: a Request comes in; Events, and in the end an Output, go out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum

from engine.logprobs import TokenLogprobs
from engine.params import FinishReason, SamplingParams


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
