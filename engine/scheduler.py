"""Which tokens of which sequences the next step computes, and what becomes of the tokens it sampled.

There are no prefill and decode phases: every sequence catches `computed` up to `len(tokens)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.plan import Sampled, StepPlan
from engine.request import Event, Request, Sequence
from engine.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment and counters since the start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    """Blocks that a sequence holds; cached blocks that nobody holds count as free."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    aborted: int


class Scheduler:
    """Not thread-safe, except for `check`. One thread calls schedule, execute, update, in turn."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        ageing_s: float = 30.0,
        enable_prefix_caching: bool = True,
        version: str = "",
        new_detokenizer: Callable[[], Detokenizer | None] = lambda: None,
        vocab_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Raise RequestError if the request could never run. Reads only settings: any thread may call it."""
        raise NotImplementedError

    def add(self, request: Request) -> list[Event]:
        """Queue a request. Raises RequestError as `check` does, and for an id that is in use.

        Returns the events (token_ids=[]) of choices whose `resume` shows that they had already finished; they
        must be delivered like those of `update`. Usually empty.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks; False if there is none. No event follows."""
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        raise NotImplementedError

    def update(self, plan: StepPlan, sampled: list[Sampled], now: float) -> list[Event]:
        """Enter a step's results: `sampled` has one entry for each row with samples=True, in order.

        Rows whose sequence was aborted or failed since `schedule` are passed over (their entry is still there).
        """
        raise NotImplementedError

    def fail(self, target: Sequence | str, message: str) -> list[Event]:
        """End one sequence, or all choices of a request id, with finish_reason "error"."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True while any sequence is running or waiting."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        raise NotImplementedError

    def preempted(self, now: float) -> list[tuple[str, float]]:
        """(request id, seconds) of requests that were put out of the batch and have no choice running."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise EngineError if blocks, slots, queues and tables do not agree with each other."""
        raise NotImplementedError
