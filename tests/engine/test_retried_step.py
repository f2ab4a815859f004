"""A step that fails after it has written to the KV cache, and is then run row by row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine.execution.loop import StepLoop
from engine.kv import KvSpace
from engine.params import SamplingParams
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request, Tier
from engine.sequence import Sequence
from tests.engine.looping import PATIENCE
from tests.engine.stepping import made

BLOCK = 4


class Cache:
    """An executor that keeps tokens where a model keeps their K/V, and samples from all that a sequence finds there.

    Each step of several rows fails when its rows are written. `at_step` is called with the number of each such step.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [[-1] * BLOCK for _ in range(num_blocks)]
        self.at_step: Callable[[int], None] = lambda number: None
        self.steps = 0
        #: Tokens that were in blocks when these were copied, and that a row of the same step has replaced by others.
        self.replaced = 0
        self._copied: set[int] = set()

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        for _, source, destination in copies:
            self._copied.add(source)
            self.blocks[destination] = list(self.blocks[source])

    def launch(self, plan: StepPlan) -> list[Sampled]:
        results = []
        for row in plan.rows:
            table = row.seq.tables[0].blocks
            end = row.start + row.count
            for i in range(row.start, end):
                block, place = table[i // BLOCK], i % BLOCK
                self.replaced += block in self._copied and self.blocks[block][place] not in (-1, row.seq.tokens[i])
                self.blocks[block][place] = row.seq.tokens[i]
            if row.samples:
                results.append(Sampled(following([self.blocks[table[i // BLOCK]][i % BLOCK] for i in range(end)])))
        if len(plan.rows) > 1:
            self.steps += 1
            self.at_step(self.steps)
            raise ZeroDivisionError("it has written, and fails")
        self._copied.clear()
        return results

    def collect(self, launched: list[Sampled]) -> list[Sampled]:
        return launched

    def needs_token(self, sequence: Sequence) -> bool:
        return False

    def forget(self) -> None:
        pass


def following(tokens: list[int]) -> int:
    return 10 + sum((i + 1) * token for i, token in enumerate(tokens)) % 1009


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def test_a_block_that_was_copied_and_then_given_away_in_one_plan_is_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second choice of `pair` ages past everybody, the first included, from which it copies the end of the prompt.
    Then a decode of the same plan wants a block: the first choice is put out, and what was copied is written over."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("engine.execution.pipeline.time", SimpleNamespace(monotonic=lambda: clock.now))
    prompts = {"short": [1, 2, 3, 4], "one": [5, 6, 7], "two": [8, 9, 1], "pair": [2, 3, 4, 5, 6, 7]}
    lengths = {"short": 2, "one": 9, "two": 9, "pair": 5}
    tiers = {"short": Tier.PRIORITY, "one": Tier.FLEX, "two": Tier.FLEX, "pair": Tier.BATCH}
    tokens: dict[tuple[str, int], list[int]] = {}
    ended = {name: threading.Event() for name in prompts}

    def on_event(event: Event) -> None:
        tokens.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
        if event.done:
            ended[event.request_id].set()

    scheduler = made(
        spaces=[KvSpace(6)],
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=24,
        ageing_s=10.0,
        enable_prefix_caching=False,
    )
    cache = Cache(6)
    loop = StepLoop(scheduler, cache, lambda: None)

    def at_step(number: int) -> None:
        if number == 1:
            clock.now = 25.0

    cache.at_step = at_step
    with loop._wake:  # all are there before the first step
        for name, prompt in prompts.items():
            params = SamplingParams(max_tokens=lengths[name], n=2 if name == "pair" else 1)
            loop.submit(Request(name, prompt, params, tier=tiers[name], arrival=0.0), on_event)
    for event in ended.values():
        assert event.wait(PATIENCE)
    loop.close()
    scheduler.check_integrity()
    assert cache.replaced, "nothing that was copied was written over: the case was not met"
    for (name, _), found in tokens.items():
        assert found == expected(prompts[name], lengths[name])
    assert len(tokens) == 5
