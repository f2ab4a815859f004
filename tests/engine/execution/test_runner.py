"""Plans executed on a real model by both runners: neighbours, chunks, copies and rubbish in the cache are harmless."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.execution.device import DeviceRunner
from engine.execution.runner import Runner
from engine.kernels.reference import Ragged
from engine.kv import KvSpace
from engine.memory import block_bytes
from engine.models import load_model
from tests.engine.execution.device.test_runner import BLOCK, PROMPT, logprobs, made, plan, scheduled, seq

AnyRunner = Runner | DeviceRunner


def plain(model_folder: Path, device: torch.device) -> Runner:
    return Runner(load_model(model_folder, "auto", device), spaces=[KvSpace(24)], block_size=BLOCK, max_num_seqs=4)


@pytest.fixture(params=["plain", "replayed", "eager"])
def runner(model_folder: Path, device: torch.device, request: pytest.FixtureRequest) -> AnyRunner:
    if request.param == "plain":
        return plain(model_folder, device)
    return made(load_model(model_folder, "auto", device, Ragged), graphs=request.param == "replayed")


@pytest.fixture
def expected(runner: AnyRunner) -> list[float]:
    """PROMPT in one go, alone."""
    return logprobs(runner, scheduled(seq(0, PROMPT, [20, 21, 22]), 0, len(PROMPT)))[0]


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [10, 1], [3, 8]])
def test_chunks_of_any_size_give_the_same(runner: AnyRunner, expected: list[float], chunks: list[int]) -> None:
    one = seq(1, PROMPT, [7, 2, 5])
    start = 0
    found: list[list[float]] = []
    for count in chunks:
        found = logprobs(runner, scheduled(one, start, count))
        start += count
    assert found[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("done", [5, 10])
def test_neighbours_change_nothing(runner: AnyRunner, expected: list[float], done: int) -> None:
    one, other, third = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT[::-1], [3, 4, 5]), seq(2, [8], [6])
    logprobs(runner, scheduled(one, 0, done), scheduled(other, 0, 10))
    found = logprobs(runner, scheduled(other, 10, 1), scheduled(one, done, 11 - done), scheduled(third, 0, 1))
    assert found[1] == pytest.approx(expected, abs=1e-4)
    alone = logprobs(runner, scheduled(seq(3, PROMPT[::-1], [10, 11, 12]), 0, 11))[0]
    assert found[0] == pytest.approx(alone, abs=1e-4)


def test_decodes_that_do_not_sample_are_passed_over(runner: AnyRunner, expected: list[float]) -> None:
    """A chunk may be of one token, when no more of the step's are left."""
    one, other = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT, [3, 4, 5])
    logprobs(runner, scheduled(one, 0, 10), scheduled(other, 0, 4))
    found = logprobs(runner, scheduled(other, 4, 1), scheduled(one, 10, 1))
    assert len(found) == 1
    assert found[0] == pytest.approx(expected, abs=1e-4)


def test_shared_and_copied_blocks_serve_another_sequence(runner: AnyRunner, expected: list[float]) -> None:
    first = seq(0, PROMPT, [0, 1, 2])
    logprobs(runner, scheduled(first, 0, 11))
    # Blocks 0 and 1 are shared, the third, partial one, is copied; only the last token is computed.
    second = seq(1, PROMPT, [0, 1, 9])
    first.tokens.append(77)
    found = logprobs(runner, scheduled(first, 11, 1), scheduled(second, 10, 1), copies=[(0, 2, 9)])
    assert found[1] == pytest.approx(expected, abs=1e-4)
    second.tokens.append(78)
    going_on = logprobs(runner, scheduled(second, 11, 1))[0]
    alone = logprobs(runner, scheduled(seq(2, [*PROMPT, 78], [12, 13, 14]), 0, 12))[0]
    assert going_on == pytest.approx(alone, abs=1e-4)


def test_leftovers_of_an_earlier_sequence_harm_no_other(runner: AnyRunner, expected: list[float]) -> None:
    for cache in runner._caches:
        # The plain runner's last block is where padding goes.
        cache[:, :, : 24 if isinstance(runner, Runner) else None] = float("nan")
    short, one = seq(1, [4], [11]), seq(0, PROMPT, [0, 1, 2])
    found = logprobs(runner, scheduled(one, 0, 11), scheduled(short, 0, 1))
    assert found[0] == pytest.approx(expected, abs=1e-4)
    for token in (6, 60, 160, 16, 61):
        short.tokens.append(token)
        short.tables[0].blocks += [12] if len(short.tokens) == BLOCK + 1 else []
        one.tokens.append(token)
        one.tables[0].blocks += [3] if len(one.tokens) == 3 * BLOCK + 1 else []
        found = logprobs(runner, scheduled(short, len(short.tokens) - 1, 1), scheduled(one, len(one.tokens) - 1, 1))
        assert len(found) == 2


def test_a_plan_that_samples_nothing_returns_nothing(runner: AnyRunner) -> None:
    assert runner.execute(plan(scheduled(seq(0, PROMPT, [0, 1, 2]), 0, 5))) == []


def test_executing_a_row_again_gives_the_same(runner: AnyRunner, expected: list[float]) -> None:
    one = seq(0, PROMPT, [0, 1, 2])
    logprobs(runner, scheduled(one, 0, 11))
    assert logprobs(runner, scheduled(one, 0, 11))[0] == pytest.approx(expected, abs=1e-4)


def test_block_bytes_are_what_a_block_of_the_cache_takes(model_folder: Path) -> None:
    model = load_model(model_folder, "auto", torch.device("cpu"))
    per_block = plain(model_folder, torch.device("cpu"))._caches[0][:, :, 0]
    assert block_bytes(model.kv_groups[0], BLOCK, 4) == per_block.numel() * per_block.element_size()
