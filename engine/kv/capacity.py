"""The capacity of one engine: the KV memory, the sequences of a batch, and the tokens of a step and of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv.groups import KvSpace


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sized once, when the model is placed, and handed down. Raises EngineError if a step could not hold one token of
    each sequence."""

    spaces: Sequence[KvSpace]
    """The memory of each KV group."""
    block_size: int
    """The tokens of a KV block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """The tokens of a step."""
    max_model_len: int
    """The tokens of prompt and output together."""
    unhurried_tokens: int | None = None
    """The tokens of a step without a prompt of the best tier. None: as many as of any step."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "unhurried_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.max_num_seqs:
                less = f"{name}={tokens} is less than max_num_seqs={self.max_num_seqs}"
                raise EngineError(f"{less}: a step must hold one token of every sequence")

    @property
    def step_tokens(self) -> int:
        """The tokens of a step without a prompt of the best tier."""
        return min(self.max_num_batched_tokens, self.unhurried_tokens or self.max_num_batched_tokens)

    @property
    def tokens_of_one(self) -> int:
        """The tokens of the longest sequence that the KV memory holds."""
        return min(space.tokens_of_one(self.block_size) for space in self.spaces)

    @property
    def tokens_of_all(self) -> int:
        """The tokens of whole sequences that the KV memory holds at one time."""
        return min(space.tokens_of_all(self.block_size, self.max_model_len) for space in self.spaces)
