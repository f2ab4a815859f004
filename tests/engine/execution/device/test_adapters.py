"""Adapters by tables on the device: what the plain runner says, also of recorded steps whose adapters change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.adapters import Adapter, load_adapter
from engine.execution.device import DeviceRunner
from engine.execution.device.graphs import Recorded
from engine.execution.device.rehearsal import rehearse
from engine.execution.runner import Runner
from engine.kv import KvSpace
from engine.models import load_model
from engine.plan import StepPlan
from tests.engine.adapters.folders import stacked, tensors, write_adapter
from tests.engine.execution.device.test_runner import BLOCK, PROMPT, SETTINGS, plan, scheduled, seq, told
from tests.engine.random_models import BASE, FAMILIES, write_model

SPACES = [KvSpace(24)]
SHAPE = {"num_hidden_layers": 1}
LOGIT = 1e-3


class Pair:
    """The same base and adapters, on the device and by plain torch."""

    def __init__(self, folder: Path, device: torch.device, **changes: Any) -> None:
        shape = SHAPE | changes
        base = write_model(folder / "base", **shape)
        models = load_model(base, "float32", device, "triton"), load_model(base, "float32", torch.device("cpu"))
        whole = {"base_model.model.model.embed_tokens.weight": torch.randn(BASE["vocab_size"], BASE["hidden_size"]) / 9}
        folders = [
            write_adapter(folder / "one", tensors(seed=1, **SHAPE)),
            write_adapter(folder / "two", tensors(seed=2, rank=3, **SHAPE), r=3),
            write_adapter(folder / "wide", tensors(seed=3, rank=200, spread=0.05, **SHAPE), r=200),
            write_adapter(folder / "words", tensors(seed=4, **SHAPE) | whole, modules_to_save=["embed_tokens"]),
        ]
        if changes:
            folders = [write_adapter(folder / "experts", stacked(shape))]
        self.adapters = [[load_adapter(each, model) for each in folders] for model in models]
        self.runner = DeviceRunner(models[0], spaces=SPACES, record=Recorded, **SETTINGS)
        self.plain = Runner(models[1], spaces=SPACES, block_size=BLOCK, max_num_seqs=4)

    def agree(self, *rows: tuple[int, int, int, int | None]) -> None:
        """`rows`: slot, start, count and adapter of each."""
        ours, theirs = (self._plan(rows, adapters) for adapters in self.adapters)
        for found, expected in zip(told(self.runner.execute(ours)), told(self.plain.execute(theirs)), strict=True):
            assert found == pytest.approx(expected, abs=LOGIT)

    @staticmethod
    def _plan(rows: tuple[tuple[int, int, int, int | None], ...], adapters: list[Adapter]) -> StepPlan:
        made = []
        for slot, start, count, adapter in rows:
            one = seq(slot, [*PROMPT, 6, 4, 8][: start + count], [4 * slot + i for i in range(4)])
            one.adapter = None if adapter is None else adapters[adapter]
            made.append(scheduled(one, start, count))
        return plan(*made)


@pytest.fixture
def pair(tmp_path: Path, device: torch.device) -> Pair:
    return Pair(tmp_path, device)


def test_rows_of_any_adapters_say_what_plain_torch_says(pair: Pair) -> None:
    """Prompts and decodes; adapters that come, go on and change places; recordings serve all of them."""
    pair.agree((0, 0, 11, 0), (1, 0, 11, None))
    pair.agree((2, 0, 11, 1), (3, 0, 11, 3))
    pair.agree((0, 11, 1, 0), (1, 11, 1, None), (2, 11, 1, 1))
    graphs = pair.runner.graphs
    assert graphs is not None
    recorded = len(graphs)
    assert recorded == 1
    pair.agree((0, 12, 1, 1), (1, 12, 1, 0), (2, 12, 1, None))
    assert len(graphs) == recorded
    pair.agree((3, 11, 1, 3), (0, 13, 1, 0))  # one with an embedding of its own is not recorded
    assert len(graphs) == recorded
    pair.agree((1, 13, 1, 2), (2, 13, 1, 2))  # of more ranks than recordings have room for
    assert len(graphs) == 1
    pair.agree((1, 12, 1, None), (2, 12, 1, None))
    assert len(graphs) == 2


def test_what_did_not_reach_the_device_is_written_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.agree((0, 0, 11, 0))
    adapters = pair.runner._adapters
    assert adapters is not None
    monkeypatch.setattr(adapters._ring, "send", lambda size, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.agree((0, 11, 1, 1))
    monkeypatch.undo()
    tables = adapters._tables
    assert tables is not None
    with torch.inference_mode():
        for table in (tables.offsets, tables.starts, tables.ranks):
            table.zero_()
    pair.agree((0, 11, 1, 1), (0, 11, 1, 0))


def test_more_adapters_than_places_take_turns(pair: Pair) -> None:
    adapters = pair.runner._adapters
    assert adapters is not None
    adapters._used[2:] = []
    for first, second in ((0, 1), (1, 3), (0, 3), (1, 0)):
        pair.agree((0, 0, 11, first), (1, 0, 11, second))


@pytest.mark.exhaustive
def test_an_adapter_of_experts_runs_in_steps_that_are_not_recorded(tmp_path: Path, device: torch.device) -> None:
    pair = Pair(tmp_path, device, **FAMILIES["mixtral"] | SHAPE)
    pair.agree((0, 0, 11, 0), (1, 0, 11, None))
    pair.agree((1, 11, 1, None))
    graphs = pair.runner.graphs
    assert graphs is not None
    assert len(graphs) == 1
    pair.agree((0, 11, 1, 0), (1, 12, 1, None))
    assert len(graphs) == 1


@pytest.mark.exhaustive
def test_a_rehearsal_leaves_no_adapter(pair: Pair) -> None:
    assert pair.runner._adapters is not None
    rehearse(pair.runner, 16)
    assert not pair.runner._adapters.used
    pair.agree((0, 0, 11, 1))
