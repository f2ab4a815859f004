"""Plans executed by the device's runner: steps on their way change nothing. test_runner.py beside has what holds for
both runners."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.device import DeviceRunner
from engine.execution.device.graphs import Recorded, Recording
from engine.execution.runner import Runner
from engine.kernels.reference import Ragged
from engine.kv import KvSpace, Table
from engine.models import Model, load_model
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.sequence import UNKNOWN, Sequence
from tests.engine.sampling.sequences import sequence

BLOCK = 4
PROMPT = [5, 9, 200, 31, 7, 7, 90, 14, 3, 250, 11]
SETTINGS = {"block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}


@pytest.fixture
def model(model_folder: Path, device: torch.device) -> Model:
    return load_model(model_folder, "auto", device, Ragged)


@pytest.fixture(params=[True, False], ids=["replayed", "eager"])
def runner(model: Model, request: pytest.FixtureRequest) -> DeviceRunner:
    return made(model, graphs=request.param)


def made(model: Model, **settings: Any) -> DeviceRunner:
    # Plain torch asks for lengths, which no graph can record: on any device a stand-in.
    settings = {"spaces": [KvSpace(24)], "record": Recorded} | SETTINGS | settings
    return DeviceRunner(model, **settings)


def seq(slot: int, tokens: list[int], table: list[int], **params: Any) -> Sequence:
    one = sequence(slot, **({"temperature": 0.0, "logprobs": 5} | params))
    one.tokens, one.tables = list(tokens), [Table(table)]
    return one


def scheduled(one: Sequence, start: int, count: int) -> ScheduledSeq:
    return ScheduledSeq(one, start, count, start + count == len(one.tokens))


def plan(*rows: ScheduledSeq, copies: list[tuple[int, int, int]] | None = None) -> StepPlan:
    return StepPlan(list(rows), copies or [], sum(row.count for row in rows))


def told(found: list[Sampled]) -> list[list[float]]:
    assert all(one.error is None for one in found)
    return [[value for _, value in one.logprobs.top] for one in found if one.logprobs is not None]


def logprobs(
    runner: Runner | DeviceRunner, *rows: ScheduledSeq, copies: list[tuple[int, int, int]] | None = None
) -> list[list[float]]:
    """Of the five likeliest tokens, for each sampling row; runs the plan."""
    return told(runner.execute(plan(*rows, copies=copies)))


def generated(runner: DeviceRunner, ahead: int, **params: Any) -> dict[int, list[int]]:
    """Six tokens of each of two sequences, with `ahead` steps launched before the tokens of the last are known."""
    both = [seq(0, PROMPT, [0, 1, 2, 3, 4], **params), seq(2, PROMPT[:3], [5, 6, 7], **params)]
    found: dict[int, list[int]] = {0: [], 2: []}
    flying = []
    for step in range(6 + ahead):
        if step < 6:
            rows = []
            for one in both:
                begin = len(one.tokens) - 1 if step else 0
                one.pending = one.tokens[-1] == UNKNOWN
                rows.append(scheduled(one, begin, len(one.tokens) - begin))
            flying.append((runner.launch(plan(*rows)), [len(one.tokens) for one in both]))
            for one in both:
                one.tokens.append(UNKNOWN)
        if step >= ahead:
            launched, places = flying.pop(0)
            for one, place, sampled in zip(both, places, runner.collect(launched), strict=True):
                one.tokens[place] = sampled.token_id
                found[one.slot].append(sampled.token_id)
    return found


PENALISED = {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 1.5}


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, PENALISED], ids=["greedy", "drawn", "penalised"])
def test_steps_launched_ahead_take_their_tokens_from_those_before(
    runner: DeviceRunner, params: dict[str, float]
) -> None:
    assert generated(runner, 1, **params) == generated(runner, 0, **params)


def test_a_step_that_failed_is_executed_as_if_nothing_had_been(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made(model)
    expected = logprobs(runner, scheduled(seq(0, PROMPT, [20, 21, 22]), 0, len(PROMPT)))[0]
    one, other = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT, [3, 4, 5])
    step = plan(scheduled(one, 0, 11), scheduled(other, 0, 4))
    with monkeypatch.context() as broken:
        broken.setattr(runner._inputs._ring, "send", lambda size, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.launch(step)
    assert logprobs(runner, *step.rows)[0] == pytest.approx(expected, abs=1e-4)


def test_decodes_are_recorded_once_for_each_size(model: Model) -> None:
    recorded: list[Recording] = []

    def record(run: Callable[[], None]) -> Recording:
        recorded.append(Recorded(run))
        return recorded[-1]

    runner = made(model, record=record)
    seqs = [seq(i, PROMPT, [5 * i, 5 * i + 1, 5 * i + 2, 5 * i + 3]) for i in range(4)]
    for one in seqs:
        logprobs(runner, scheduled(one, 0, 11))
    assert recorded == []
    for count in (3, 4, 1, 3, 2, 1):
        logprobs(runner, *(scheduled(one, 10, 1) for one in seqs[:count]))
    assert runner.graphs is not None
    assert len(recorded) == len(runner.graphs) == 3


def test_where_recording_fails_steps_run_without_and_it_is_said_once(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    def record(run: Callable[[], None]) -> Recording:
        raise RuntimeError("no capture today")

    with caplog.at_level(logging.WARNING, "penstock.engine"):
        found = generated(made(model, record=record), 0, temperature=1.0)
    assert found == generated(made(model, graphs=False), 0, temperature=1.0)
    assert [record.message for record in caplog.records] == [
        "a decode step could not be recorded as a CUDA graph; what is not recorded by now runs without"
    ]


def test_what_was_recorded_before_is_still_replayed(model: Model) -> None:
    replayed: list[int] = []

    class Noted(Recorded):
        def replay(self) -> None:
            replayed.append(1)
            super().replay()

    def record(run: Callable[[], None]) -> Recording:
        if replayed:
            raise RuntimeError("one is enough")
        return Noted(run)

    runner = made(model, record=record)
    seqs = [seq(i, PROMPT, [5 * i, 5 * i + 1, 5 * i + 2]) for i in range(2)]
    for count in (1, 2, 1):
        for one in seqs[:count]:
            logprobs(runner, scheduled(one, 0, 10))
        alone = [logprobs(runner, scheduled(one, 10, 1))[0] for one in seqs[:1]]
        found = logprobs(runner, *(scheduled(one, 10, 1) for one in seqs[:count]))
        assert found[0] == pytest.approx(alone[0], abs=1e-4)
    assert len(replayed) == 5


def test_recordings_are_dropped_when_the_tables_move(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.device.rows._MOST_AT_ONCE", 0)
    monkeypatch.setattr("engine.execution.device.rows._NARROWEST", 1)
    runner = made(model)
    assert generated(runner, 0, temperature=1.0) == generated(made(model, graphs=False), 0, temperature=1.0)
    assert runner._rows.version > 0
