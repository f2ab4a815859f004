"""The capacity of one engine: the KV memory, the sequences of a batch, and the tokens of a step and of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.groups import KvSpace


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sized once, when the model is placed, and handed down. A step holds at least one token of each sequence."""

    spaces: Sequence[KvSpace]
    """The memory of each KV group."""
    block_size: int
    """The tokens of a KV block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """The tokens of a step."""
    max_model_len: int
    """The tokens of prompt and output together."""
    max_non_priority_step_tokens: int | None = None
    """The tokens of a step without a prompt of the best tier. None: as many as of any step."""

    @property
    def step_tokens(self) -> int:
        """The tokens of a step without a prompt of the best tier."""
        return min(self.max_num_batched_tokens, self.max_non_priority_step_tokens or self.max_num_batched_tokens)

    @property
    def tokens_of_one(self) -> int:
        """The tokens of the longest sequence that the KV memory holds."""
        return min(space.tokens_of_one(self.block_size) for space in self.spaces)

    @property
    def tokens_of_all(self) -> int:
        """The tokens of whole sequences that the KV memory holds at one time."""
        return min(space.tokens_of_all(self.block_size, self.max_model_len) for space in self.spaces)
