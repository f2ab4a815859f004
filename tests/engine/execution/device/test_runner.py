"""Plans executed by the device's runner: neighbours, chunks, steps on their way and rubbish change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.device import DeviceRunner
from engine.execution.device.graphs import Recorded, Recording
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
    runner: DeviceRunner, *rows: ScheduledSeq, copies: list[tuple[int, int, int]] | None = None
) -> list[list[float]]:
    """Of the five likeliest tokens, for each sampling row; runs the plan."""
    return told(runner.execute(plan(*rows, copies=copies)))


@pytest.fixture
def expected(runner: DeviceRunner) -> list[float]:
    """PROMPT in one go, alone."""
    return logprobs(runner, scheduled(seq(0, PROMPT, [20, 21, 22]), 0, len(PROMPT)))[0]


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [10, 1], [3, 8]])
def test_chunks_of_any_size_give_the_same(runner: DeviceRunner, expected: list[float], chunks: list[int]) -> None:
    one = seq(1, PROMPT, [7, 2, 5])
    start = 0
    found: list[list[float]] = []
    for count in chunks:
        found = logprobs(runner, scheduled(one, start, count))
        start += count
    assert found[0] == pytest.approx(expected, abs=1e-4)


def test_neighbours_change_nothing(runner: DeviceRunner, expected: list[float]) -> None:
    one, other, third = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT[::-1], [3, 4, 5]), seq(2, [8], [6])
    logprobs(runner, scheduled(one, 0, 10), scheduled(other, 0, 10))
    found = logprobs(runner, scheduled(other, 10, 1), scheduled(one, 10, 1), scheduled(third, 0, 1))
    assert found[1] == pytest.approx(expected, abs=1e-4)
    alone = logprobs(runner, scheduled(seq(3, PROMPT[::-1], [10, 11, 12]), 0, 11))[0]
    assert found[0] == pytest.approx(alone, abs=1e-4)


def test_decodes_that_do_not_sample_are_passed_over(runner: DeviceRunner, expected: list[float]) -> None:
    """A chunk may be of one token, when no more of the step's are left."""
    one, other = seq(0, PROMPT, [0, 1, 2]), seq(1, PROMPT, [3, 4, 5])
    logprobs(runner, scheduled(one, 0, 10), scheduled(other, 0, 4))
    found = logprobs(runner, scheduled(other, 4, 1), scheduled(one, 10, 1))
    assert len(found) == 1
    assert found[0] == pytest.approx(expected, abs=1e-4)


def test_shared_and_copied_blocks_serve_another_sequence(runner: DeviceRunner, expected: list[float]) -> None:
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


def test_leftovers_of_an_earlier_sequence_harm_no_other(runner: DeviceRunner, expected: list[float]) -> None:
    for cache in runner._caches:
        cache.fill_(float("nan"))
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


def test_a_plan_that_samples_nothing_returns_nothing(runner: DeviceRunner) -> None:
    assert runner.execute(plan(scheduled(seq(0, PROMPT, [0, 1, 2]), 0, 5))) == []


def test_executing_a_row_again_gives_the_same(runner: DeviceRunner, expected: list[float]) -> None:
    one = seq(0, PROMPT, [0, 1, 2])
    logprobs(runner, scheduled(one, 0, 11))
    assert logprobs(runner, scheduled(one, 0, 11))[0] == pytest.approx(expected, abs=1e-4)


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


def test_a_step_that_failed_is_executed_as_if_nothing_had_been(
    model: Model, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = made(model)
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
