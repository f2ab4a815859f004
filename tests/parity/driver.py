"""Scheduler and runner stepped by hand, so that a test decides what happens between two steps."""

from __future__ import annotations

from typing import Any

import torch

from engine.adapters import Adapter
from engine.execution.device import DeviceRunner
from engine.execution.runner import Runner
from engine.kv import KvSpace
from engine.layers import AdaptedRows
from engine.models import Model
from engine.params import SamplingParams
from engine.plan import StepPlan
from engine.request import Event, Request
from tests.engine.stepping import made

#: Far more steps than any history here needs: a livelock fails instead of hanging.
_MOST_STEPS = 5000


class Driver:
    def __init__(
        self,
        model: Model,
        *,
        blocks: int = 256,
        block_size: int = 16,
        sequences: int = 8,
        tokens: int = 64,
        overlap: int = 0,
        runner: type[Runner] = Runner,
        device_runner: type[DeviceRunner] = DeviceRunner,
        **settings: Any,
    ) -> None:
        """`overlap`: how many steps are planned and launched before the oldest is entered. `runner`: of a
        model whose kernels are not ragged; `device_runner`: of one whose are."""
        spaces = [KvSpace(blocks, group.window) for group in model.kv_groups]
        self.runner: Runner | DeviceRunner
        if model.kernels.ragged:
            self.runner = device_runner(
                model,
                spaces=spaces,
                block_size=block_size,
                max_num_seqs=sequences,
                max_num_batched_tokens=tokens,
                max_model_len=model.context_length,
            )
        else:
            self.runner = runner(model, spaces=spaces, block_size=block_size, max_num_seqs=sequences)
        self.scheduler = made(
            spaces=spaces,
            block_size=block_size,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            max_model_len=model.context_length,
            vocab_size=model.vocab_size,
            rope_switch=model.rope_switch,
            **settings,
        )
        self.found: dict[str, dict[int, list[int]]] = {}
        self.cached: dict[str, int] = {}
        self.finished: set[str] = set()
        #: All events, in order.
        self.events: list[Event] = []
        self.steps = 0
        self._overlap = overlap
        self._flights: list[tuple[StepPlan, Any]] = []

    def add(
        self, name: str, prompt: list[int], params: SamplingParams, adapter: Adapter | None = None, **more: Any
    ) -> None:
        self.found[name] = {choice: [] for choice in range(params.n)}
        request = Request(name, prompt, params, arrival=0.0, **more)
        request.loaded = adapter
        self.scheduler.add(request)

    def step(self) -> None:
        for flight in self._flights:
            self.scheduler.foresee(flight[0], self.runner.needs_token)
        plan = self.scheduler.schedule(0.0)
        assert plan is not None or self._flights
        if plan is not None and self.scheduler.speculation is not None:
            self.scheduler.speculation.propose(plan)
        if plan is not None:
            self._flights.append((plan, self.runner.launch(plan)))
        if plan is None or len(self._flights) > self._overlap:
            self._enter(*self._flights.pop(0))
        self.steps += 1
        assert self.steps < _MOST_STEPS, "the history does not come to an end"

    def _enter(self, plan: StepPlan, launched: Any) -> None:
        for event in self.scheduler.update(plan, self.runner.collect(launched), 0.0):
            assert event.error is None
            self.events.append(event)
            self.found[event.request_id][event.choice] += event.token_ids
            self.cached[event.request_id] = event.cached_tokens
            if event.done:
                self.finished.add(event.request_id)

    def run(self, preempt_every: int | None = None) -> dict[str, list[int]]:
        """Step to the end; the tokens of every request's choice 0."""
        while self.scheduler.has_work or self._flights:
            if preempt_every is not None and self.steps % preempt_every == preempt_every - 1:
                self.preempt()
            self.step()
        self.scheduler.check_integrity()
        assert self.scheduler.stats().kv_blocks_used == 0
        return {name: choices[0] for name, choices in self.found.items()}

    def preempt(self) -> None:
        """Put the last running sequence out, as a lack of blocks would."""
        planner = self.scheduler._planner
        if planner.running:
            planner.preempt(planner.running[-1], 0.0)


def recorded(model: Model) -> list[torch.Tensor]:
    """The logits of each step to come; greedy rows make theirs, too, where the kernels need none."""
    seen: list[torch.Tensor] = []
    logits = model.logits

    def record(hidden: torch.Tensor, adapters: AdaptedRows | None = None) -> torch.Tensor:
        seen.append(logits(hidden, adapters).clone())
        return seen[-1]

    model.logits = record  # type: ignore[method-assign]
    model.peaks = lambda hidden: None  # type: ignore[method-assign]
    return seen


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def prompts_of(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
