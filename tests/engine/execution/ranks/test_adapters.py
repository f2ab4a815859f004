"""Adapters on ranks: each has its part of their matrices, and together they change what one process changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters import Adapter, load_adapter
from engine.errors import NOT_FINITE, ModelError
from engine.kernels.native import load_library
from engine.models import load_model
from tests.engine.adapters.folders import stacked, tensors, too_large, write_adapter
from tests.engine.adapters.test_native import adapter_of
from tests.engine.execution.ranks.in_threads import ranks_of
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of, recorded

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")


def run(driver: Driver, adapters: list[Adapter | None]) -> dict[str, list[int]]:
    for i, (prompt, adapter) in enumerate(zip(prompts_of([20, 1, 33, 7], 320), adapters, strict=True)):
        driver.add(str(i), prompt, greedy(6), adapter)
    return driver.run()


@pytest.mark.parametrize(
    ("variant", "ranks"),
    few([(name, ranks) for name in ("gqa", "mqa", "gemma2", "qwen3-moe") for ranks in (2, 4)], ("gqa", 2), ("mqa", 4)),
)
def test_adapters_are_divided(variant: str, ranks: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = (VARIANTS | FAMILIES)[variant]
    folder = write_model(tmp_path / "base", tokenizer=False, **changes)
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    one, other = (adapter_of(alone, tmp_path / str(i), rank=2 + 3 * i, seed=i, every=1 + i) for i in range(2))
    logits = recorded(alone)
    expected = run(Driver(alone), [one, other, None, one])
    with ranks_of(folder, ranks) as together:
        first, second = (together.adapter(tmp_path / str(i), i) for i in range(2))
        seen = recorded(together.lead)
        assert run(together.driver(), [first, second, None, first]) == expected
        for ours, theirs in zip(seen, logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        # The followers forget those that are gone here.
        del first
        run(together.driver(), [second, None, None, None])
        assert [sorted(adapters) for adapters in together.adapters[1:]] == [[1]] * (ranks - 1)


def test_one_whose_hidden_states_overflow_fails_its_request(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", tokenizer=False)
    adapter = write_adapter(tmp_path / "adapter", too_large())
    with ranks_of(folder, 2) as together:
        driver = together.driver()
        driver.add("huge", [5, 6, 7], greedy(6), together.adapter(adapter, 0))
        plan = driver.scheduler.schedule(0.0)
        assert plan is not None
        (event,) = driver.scheduler.update(plan, driver.runner.collect(driver.runner.launch(plan)), 0.0)
    assert (event.error, event.token_ids) == (NOT_FINITE, [])


@pytest.mark.exhaustive
def test_changes_of_all_experts_are_divided(tmp_path: Path) -> None:
    settings = FAMILIES["mixtral"]
    folder = write_model(tmp_path / "base", tokenizer=False, **settings)
    adapter = write_adapter(tmp_path / "adapter", stacked(settings))
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    one = load_adapter(adapter, alone)
    expected = run(Driver(alone), [one, None, one, one])
    assert expected != run(Driver(alone), [None] * 4)
    with ranks_of(folder, 2) as together:
        own = together.adapter(adapter, 0)
        assert run(together.driver(), [own, None, own, own]) == expected


def test_an_adapter_of_the_head_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", tokenizer=False)
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(2, 64),
        "base_model.model.lm_head.lora_B.weight": torch.ones(320, 2),
    }
    adapter = write_adapter(tmp_path / "adapter", tensors() | head)
    with ranks_of(folder, 2) as together, pytest.raises(ModelError, match="output head does not go with tensor_paral"):
        together.adapter(adapter, 0)
