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


def test_decodes_that_do_not_sample_are_passed_over(runner: AnyRunner, expected: list[float]) -> None:
    """A chunk may be of one token, when no more of the step's are left."""
    one, other = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT, [3, 4, 5])
    logprobs(runner, scheduled(one, 0, 10), scheduled(other, 0, 4))
    found = logprobs(runner, scheduled(other, 4, 1), scheduled(one, 10, 1))
    assert len(found) == 1
    assert found[0] == pytest.approx(expected, abs=1e-4)


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
