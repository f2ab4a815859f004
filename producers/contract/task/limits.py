"""Limits of a task beside those of its sampling, which `engine.params` has."""

from __future__ import annotations

from typing import Final

MAX_PROMPT_BYTES: Final = 1 << 20
MAX_PROMPT_TOKENS: Final = 1_000_000
MAX_TTL_S: Final = 30 * 24 * 3600
MAX_TIMEOUT_S: Final = 7 * 24 * 3600
MAX_TENANT: Final = 200
MAX_ORDER_KEY: Final = 128
#: Most log probabilities of a task's output, alternatives included: some fifty megabytes as text.
MAX_LOGPROBS: Final = 1 << 20
#: Most output tokens of a task with best_of. One call publishes them and keeps the store busy for tenths of a second.
MAX_BEST_TOKENS: Final = 16_384
#: Estimated bytes a token of text, which overestimates the tokens of most texts.
BYTES_PER_TOKEN: Final = 3
#: Assumed output tokens of a task without max_tokens.
ASSUMED_OUTPUT: Final = 256
