"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment and counters since the start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    """Blocks that a sequence holds; cached blocks that nobody holds count as free."""
    kv_blocks_most: int
    """The most that were held in any step."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    aborted: int
    out_of_memory: int
    """Steps for which the device had no memory."""
    shrinks: int
    """Times that steps were made smaller for it."""
    not_finite: int
    """Sequences that ended because the model's logits were NaN or infinite."""
    drafted: int
    """Tokens that were guessed, and computed with the target."""
    draft_accepted: int
    """Of these, how many were what the target chose."""
