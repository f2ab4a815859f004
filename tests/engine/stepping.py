"""A small scheduler and how to step it by hand, for tests that look at its plans."""

from __future__ import annotations

from dataclasses import fields

from engine.kv import Capacity, KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request, Tier
from engine.scheduling.limits import ModelTraits
from engine.scheduling.policy import Policy
from engine.scheduling.scheduler import Scheduler
from engine.speculate import Speculation

EOS = 9


def scheduler(*, num_blocks: int = 16, windows: tuple[int | None, ...] = (None,), **settings) -> Scheduler:
    """With `num_blocks` in each of the KV groups that `windows` says. `settings`: of capacity, model and policy."""
    defaults = {
        "spaces": [KvSpace(num_blocks, window) for window in windows],
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "eos_token_ids": [EOS],
        "seed": 1,
    }
    return made(**defaults | settings)


def made(*, speculation: Speculation | None = None, **settings) -> Scheduler:
    """A scheduler with settings of `Capacity`, `ModelTraits` and `Policy`, each by its field's name."""
    parts = [
        kind(**{one.name: settings.pop(one.name) for one in fields(kind) if one.name in settings})
        for kind in (Capacity, ModelTraits, Policy)
    ]
    assert not settings
    return Scheduler(*parts, speculation)


def request(name: str, prompt: int | list[int] = 4, tier: int = Tier.DEFAULT, arrival: float = 0.0, **rest) -> Request:
    """A prompt given by its length shares no block with that of another name."""
    if isinstance(prompt, int):
        prompt = [100 + sum(name.encode()), *range(1, prompt)]
    known = {key: rest.pop(key) for key in ("resume", "salt", "adapter", "tenant", "weight") if key in rest}
    return Request(name, prompt, SamplingParams(**rest), tier=tier, arrival=arrival, **known)


def step(s: Scheduler, now: float = 0.0, token: int = 1) -> tuple[StepPlan, list[Event]]:
    plan = s.schedule(now)
    assert plan is not None
    events = s.update(plan, [Sampled(token) for row in plan.rows if row.samples], now)
    s.check_integrity()
    return plan, events


def rows(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {row.seq.request.id: (row.start, row.count) for row in plan.rows}
