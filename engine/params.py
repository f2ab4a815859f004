"""How one request wants its tokens chosen and when they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError

#: Limits of a request, also shown in the messages that refuse one.
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MAX_INT32 = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked when made: raises RequestError naming the parameter, its value and its limits.

    Filters apply in the order temperature, top_k, top_p. Lists are taken for the tuples.
    """

    max_tokens: int | None = None
    """Tokens to generate at most; None goes up to the end of the context."""
    min_tokens: int = 0
    """EOS, stop tokens and stop strings end nothing before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities add up to this."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, like EOS: listed in token_ids, absent from text."""
    ignore_eos: bool = False
    n: int = 1
    """Independent choices made from one prompt."""
    logprobs: int | None = None
    """None: no logprobs. k: of each chosen token, and of the k likeliest."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, 0, MAX_INT32)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p=0 keeps no token; it must be above 0, up to 1", param="top_p")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos={self.ignore_eos!r} must be true or false", param="ignore_eos", code="invalid_type"
            )
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _stops(value: object) -> tuple[str, ...]:
    stops = _sequence("stop", value, MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str):
            raise RequestError(f"stop has {stop!r}, which is not a string", param="stop", code="invalid_type")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop has a string of {len(stop)} characters; each must have 1 to {MAX_STOP_CHARS}",
                param="stop",
            )
    return stops


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = _sequence("stop_token_ids", value, MAX_STOP_TOKEN_IDS)
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0, MAX_INT32)
    return ids


def _sequence(name: str, value: object, limit: int) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name}={value!r} must be a list", param=name, code="invalid_type")
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} entries; at most {limit} are allowed", param=name)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer", param=name, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name}={value} must be from {low} to {high}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}={value!r} must be a number", param=name, code="invalid_type")
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name}={value} must be a number from {low:g} to {high:g}", param=name)
