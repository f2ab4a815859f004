"""Steps recorded before a model is served, and while nothing runs, change no output."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.execution.device import DeviceRunner, rehearse
from engine.execution.device.graphs import Recorded, Recording, batch_sizes
from engine.execution.device.inputs import Shape
from engine.execution.placement import while_idle
from engine.kernels.reference import Ragged
from engine.kv import KvSpace, window_blocks
from engine.models import Model, load_model
from engine.plan import StepPlan
from tests.engine.execution.device.test_runner import BLOCK, generated, made

LONG = {"max_model_len": 5000, "spaces": [KvSpace(1300)]}


@pytest.fixture
def model(model_folder: Path) -> Model:
    return load_model(model_folder, "auto", torch.device("cpu"), Ragged)


def shapes(runner: DeviceRunner) -> list[Shape]:
    assert runner.graphs is not None
    return list(runner.graphs._recordings)


def test_every_size_is_recorded_most_sequences_first_and_no_step_records_more(model: Model) -> None:
    runner = made(model)
    rehearse(runner)
    assert [shape.rows for shape in shapes(runner)] == batch_sizes(4)[::-1]
    before = shapes(runner)
    assert generated(runner, 0, temperature=1.0) == generated(made(model, graphs=False), 0, temperature=1.0)
    assert shapes(runner) == before


def test_longer_contexts_are_left_for_idle_times(model: Model) -> None:
    runner = made(model, **LONG)
    rehearse(runner)
    assert {shape.rows for shape in shapes(runner) if shape.most_places == (1024,)} == set(batch_sizes(4))
    many = [shape for shape in shapes(runner) if shape.rows > 1]
    assert {shape.most_places for shape in many} == {(1024,)}
    while runner.record_next():
        pass
    found = [shape.most_places[0] for shape in shapes(runner) if shape.rows == 4]
    assert found == [1024, 4096, 5000]
    assert len(shapes(runner)) == len(batch_sizes(4)) * 3


def test_a_recording_writes_into_no_block(model: Model) -> None:
    runner = made(model)
    for cache in runner._caches:
        cache.fill_(3.0)
    while runner.record_next():
        pass
    assert all((cache == 3.0).all() for cache in runner._caches)


def test_nothing_is_collected_while_a_step_is_recorded(model: Model) -> None:
    states: list[tuple[bool, bool]] = []

    def record(run: Callable[[], None]) -> Recording:
        states.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return Recorded(run)

    gc.unfreeze()  # as a worker is before it serves
    try:
        assert made(model, record=record).record_next()
        assert states == [(False, True)]
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_groups_with_windows_and_few_blocks_are_rehearsed(awkward: Path) -> None:
    model = load_model(awkward, "float32", torch.device("cpu"), Ragged)
    few = [
        KvSpace(24 if group.window is None else window_blocks(group.window, BLOCK) + 3, group.window)
        for group in model.kv_groups
    ]
    runner = made(model, spaces=few)
    rehearse(runner)
    assert len(shapes(runner)) == len(batch_sizes(4))


def test_a_step_without_memory_is_passed_over_and_any_other_fault_is_raised(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = made(model)
    launch = runner.launch
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory")]

    def failing(plan: StepPlan) -> object:
        if plan.num_tokens > 7 and errors:
            raise errors[0]
        return launch(plan)

    monkeypatch.setattr(runner, "launch", failing)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        rehearse(runner)
    assert "there is no memory to rehearse a step of 32 tokens" in caplog.text
    errors[0] = RuntimeError("no such kernel")
    with pytest.raises(RuntimeError, match="no such kernel"):
        rehearse(runner)


def test_an_engine_is_rehearsed_before_it_is_there(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: on a CPU there is nothing to compile."""
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    config = EngineConfig(device="cpu", kernels="ragged", max_num_seqs=4, kv_cache_bytes=1 << 20)
    found = []
    for devices in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr("engine.execution.placement.REHEARSED", devices)
        with Engine.load(model_folder, config) as engine:
            runner = engine._pipeline._executor
            assert isinstance(runner, DeviceRunner)
            assert len(shapes(runner)) == len(devices) * len(batch_sizes(4))
            assert (while_idle(runner) == runner.record_next) == bool(devices)
            found.append([one.token_ids for one in engine.generate([[5, 9, 200], [7] * 40], params)])
    assert found[0] == found[1]
