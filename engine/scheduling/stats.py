"""The scheduler's statistics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges at this moment and counters since the start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    """The blocks that sequences hold. Cached blocks that no sequence holds count as free."""
    kv_blocks_most: int
    """The most blocks held in any step."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    aborted: int
    out_of_memory: int
    """The number of steps for which the device had no memory."""
    shrinks: int
    """The number of times that steps were made smaller for lack of memory."""
    not_finite: int
    """The number of sequences that ended because the model's logits were NaN or infinite."""
    drafted: int
    """The number of draft tokens that the target model computed."""
    draft_accepted: int
    """The number of those draft tokens that were accepted."""
