"""Limits of a task, and the defaults of its sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_PROMPT_BYTES: Final = 1 << 20
MAX_PROMPT_TOKENS: Final = 1_000_000
MAX_INT32: Final = (1 << 31) - 1
MAX_SEED: Final = (1 << 63) - 1
MAX_TTL_S: Final = 30 * 24 * 3600
MAX_TIMEOUT_S: Final = 7 * 24 * 3600
MAX_TENANT: Final = 200
MAX_ORDER_KEY: Final = 128
#: Most log probabilities of a prompt's tokens, alternatives included: some megabytes as text.
MAX_PROMPT_LOGPROBS: Final = 262_144
#: Most log probabilities of a task's output, alternatives included: some fifty megabytes as text.
MAX_LOGPROBS: Final = 1 << 20
#: Most output tokens of a task with best_of. One call publishes them and keeps the store busy for tenths of a second.
MAX_BEST_TOKENS: Final = 16_384
#: Defaults of sampling parameters, unless the model's card has its own.
DEFAULTS: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}
#: Estimated bytes a token of text, which overestimates the tokens of most texts.
BYTES_PER_TOKEN: Final = 3
#: Assumed output tokens of a task without max_tokens.
ASSUMED_OUTPUT: Final = 256
