"""A bad text ends its own request alone, whatever is beside it in a step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, EngineError, PoolingEngine
from engine.errors import NOT_FINITE, TextError
from engine.execution.turns import Turns
from engine.pooling.runner import normalised, numbers
from engine.request import Event, Pooling, Request
from tests.engine.looping import until
from tests.engine.random_encoders import write_encoder
from tests.waiting import PATIENCE_S

pytest.importorskip("transformers")
BAD = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_encoder(tmp_path, "bert")
    return tmp_path


def spoil(folder: Path, name: str, rows: slice) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name][rows] = float("nan")
    save_file(weights, folder / "model.safetensors")


def run_together(engine: PoolingEngine, texts: list[list[int]]) -> list[Event]:
    """The last events of requests of a text each, which are submitted while a step runs."""
    ends: dict[str, Event] = {}
    done, began, go = threading.Event(), threading.Event(), threading.Event()
    forward = engine._model.forward

    def hold(*arguments: Any) -> torch.Tensor:
        began.set()
        assert go.wait(PATIENCE_S)
        return forward(*arguments)

    def take(event: Event) -> None:
        ends[event.request_id] = event
        if len(ends) == len(texts) + 1:
            done.set()

    engine._model.forward = hold  # type: ignore[method-assign]
    engine.submit(Request("first", [9], pooling=Pooling("embed", (1,))), take)
    assert began.wait(PATIENCE_S)
    for number, ids in enumerate(texts):
        engine.submit(Request(str(number), ids, pooling=Pooling("embed", (len(ids),))), take)
    engine._model.forward = forward  # type: ignore[method-assign]
    go.set()
    assert done.wait(PATIENCE_S)
    return [ends[str(number)] for number in range(len(texts))]


def test_nan_of_one_token_is_its_own_texts_fault(folder: Path) -> None:
    with PoolingEngine.load(folder) as engine:
        expected = engine.embed([[5, 6]])
    spoil(folder, "embeddings.word_embeddings.weight", slice(BAD, BAD + 1))
    with PoolingEngine.load(folder) as engine:
        bad, good = run_together(engine, [[5, BAD], [5, 6]])
        assert (bad.error, bad.rows, bad.finish_reason) == (NOT_FINITE, None, "error")
        assert np.array_equal(np.array(good.rows, dtype=np.float32), expected)
        assert engine.stats().not_finite == 1
        with pytest.raises(EngineError, match="not finite"):
            engine.embed([[5, 6], [BAD]])
        ends: list[Event] = []
        engine.submit(Request("apart", [BAD, 5, 6], pooling=Pooling("embed", (1, 2), item_errors=True)), ends.append)
        until(lambda: bool(ends))
        first, second = ends[0].rows or []
        assert first == TextError("engine_error", NOT_FINITE)
        assert np.array_equal(np.array([second], dtype=np.float32), expected)


def test_a_vector_whose_length_overflows_is_not_finite() -> None:
    """Not 0, which would be as near to each other vector."""
    assert numbers(normalised(torch.tensor([3e20, 4e20]))).error == NOT_FINITE
    assert numbers(normalised(torch.tensor([3.0, 4.0]))).row == pytest.approx([0.6, 0.8])


def test_a_step_that_fails_is_run_in_halves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PoolingEngine.load(folder) as engine:
        forward = engine._model.forward

        def fail(tokens: torch.Tensor, *more: Any) -> torch.Tensor:
            if BAD in tokens:
                raise RuntimeError("a kernel's fault")
            return forward(tokens, *more)

        monkeypatch.setattr(engine._model, "forward", fail)
        ends = run_together(engine, [[5], [BAD], [6, 8], [4]])
        assert [end.rows is None for end in ends] == [False, True, False, False]
        assert "a kernel's fault" in (ends[1].error or "")


def test_what_waits_when_the_engine_is_closed_ends(folder: Path) -> None:
    engine = PoolingEngine.load(folder)
    ends: list[Event] = []
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("late", [5], pooling=Pooling("embed", (1,))), ends.append)
    assert ends == []


def test_engines_of_one_cpu_take_turns_and_batches_give_way_to_those_that_generate(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    turns = tmp_path_factory.mktemp("turns")
    settings = EngineConfig(turns=str(turns), share=0.3, device="cpu", threads=1)
    generator = Turns(turns, 0.7)
    with PoolingEngine.load(folder, settings) as engine, PoolingEngine.load(folder, EngineConfig(device="cpu")) as lone:
        assert (engine.step_tokens, lone.step_tokens) == (4096, 2048), "fewer and longer batches keep others waiting"
        assert lone.turn_wait_s is None
        generator.take()
        made: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: made.append(engine.embed([[5, 6]])))
        thread.start()
        until(lambda: generator.due() or bool(generator._members["waits"].any()))
        assert made == []
        generator.hand_over()
        thread.join(PATIENCE_S)
        assert np.array_equal(made[0], lone.embed([[5, 6]]))
        assert engine.turn_wait_s is not None
        assert engine.turn_wait_s > 0
        assert generator._members["batches"].sum() == 1
    generator.close()
