"""Plans executed on a real model: neighbours, chunks, copies and rubbish in the cache change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.execution.runner import Runner
from engine.kv import KvSpace, Table
from engine.memory import block_bytes
from engine.models import load_model
from engine.plan import ScheduledSeq, StepPlan
from engine.sequence import Sequence
from tests.engine.sampling.test_sampler import sequence

BLOCK = 4
PROMPT = [5, 9, 200, 31, 7, 7, 90, 14, 3, 250, 11]


@pytest.fixture
def runner(model_folder: Path, device: torch.device) -> Runner:
    model = load_model(model_folder, "auto", device)
    return Runner(model, spaces=[KvSpace(24)], block_size=BLOCK, max_num_seqs=4)


def seq(slot: int, tokens: list[int], table: list[int]) -> Sequence:
    made = sequence(slot, temperature=0.0, logprobs=5)
    made.tokens, made.tables = list(tokens), [Table(table)]
    return made


def scheduled(one: Sequence, start: int, count: int) -> ScheduledSeq:
    return ScheduledSeq(one, start, count, start + count == len(one.tokens))


def logprobs(
    runner: Runner, *rows: ScheduledSeq, copies: list[tuple[int, int, int]] | None = None
) -> list[list[float]]:
    """Of the five likeliest tokens, for each sampling row; runs the plan."""
    found = runner.execute(StepPlan(list(rows), copies or [], sum(row.count for row in rows)))
    assert all(one.error is None for one in found)
    return [[value for _, value in one.logprobs.top] for one in found if one.logprobs is not None]


@pytest.fixture
def expected(runner: Runner) -> list[float]:
    """PROMPT in one go, alone."""
    return logprobs(runner, scheduled(seq(0, PROMPT, [20, 21, 22]), 0, len(PROMPT)))[0]


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [10, 1], [3, 8]])
def test_chunks_of_any_size_give_the_same(runner: Runner, expected: list[float], chunks: list[int]) -> None:
    one = seq(1, PROMPT, [7, 2, 5])
    start = 0
    found: list[list[float]] = []
    for count in chunks:
        found = logprobs(runner, scheduled(one, start, count))
        start += count
    assert found[0] == pytest.approx(expected, abs=1e-4)


def test_neighbours_change_nothing(runner: Runner, expected: list[float]) -> None:
    one, other, third = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT[::-1], [3, 4, 5]), seq(2, [8], [6])
    logprobs(runner, scheduled(one, 0, 5), scheduled(other, 0, 10))
    found = logprobs(runner, scheduled(other, 10, 1), scheduled(one, 5, 6), scheduled(third, 0, 1))
    assert found[1] == pytest.approx(expected, abs=1e-4)
    alone = logprobs(runner, scheduled(seq(3, PROMPT[::-1], [10, 11, 12]), 0, 11))[0]
    assert found[0] == pytest.approx(alone, abs=1e-4)


def test_shared_and_copied_blocks_serve_another_sequence(runner: Runner, expected: list[float]) -> None:
    first = seq(0, PROMPT, [0, 1, 2])
    logprobs(runner, scheduled(first, 0, 11))
    # Blocks 0 and 1 are shared, the third, partial one, is copied; only the last token is computed.
    second = seq(1, PROMPT, [0, 1, 9])
    first.tokens.append(77)
    found = logprobs(runner, scheduled(first, 11, 1), scheduled(second, 10, 1), copies=[(0, 2, 9)])
    assert found[1] == pytest.approx(expected, abs=1e-4)
    # Each goes on in its own last block.
    second.tokens.append(78)
    going_on = logprobs(runner, scheduled(second, 11, 1))[0]
    alone = logprobs(runner, scheduled(seq(2, [*PROMPT, 78], [12, 13, 14]), 0, 12))[0]
    assert going_on == pytest.approx(alone, abs=1e-4)


def test_leftovers_of_an_earlier_sequence_harm_no_other(runner: Runner, expected: list[float]) -> None:
    runner._caches[0][:, :, :24] = float("nan")
    short = seq(1, [4], [11])
    one = seq(0, PROMPT, [0, 1, 2])
    found = logprobs(runner, scheduled(one, 0, 11), scheduled(short, 0, 1))
    assert found[0] == pytest.approx(expected, abs=1e-4)
    for token in (6, 60, 160, 16, 61):
        short.tokens.append(token)
        one.tokens.append(token)
        found = logprobs(runner, scheduled(short, len(short.tokens) - 1, 1), scheduled(one, len(one.tokens) - 1, 1))
        assert len(found) == 2


def test_a_plan_that_samples_nothing_returns_nothing(runner: Runner) -> None:
    assert runner.execute(StepPlan([scheduled(seq(0, PROMPT, [0, 1, 2]), 0, 5)], [], 5)) == []


def test_executing_a_row_again_gives_the_same(runner: Runner, expected: list[float]) -> None:
    one = seq(0, PROMPT, [0, 1, 2])
    logprobs(runner, scheduled(one, 0, 11))
    assert logprobs(runner, scheduled(one, 0, 11))[0] == pytest.approx(expected, abs=1e-4)


def test_block_bytes_are_what_a_block_of_the_cache_takes(runner: Runner, model_folder: Path) -> None:
    model = load_model(model_folder, "auto", torch.device("cpu"))
    per_block = runner._caches[0][:, :, 0]
    assert block_bytes(model.kv_groups[0], BLOCK, 4) == per_block.numel() * per_block.element_size()
