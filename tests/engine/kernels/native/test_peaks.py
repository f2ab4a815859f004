"""The largest of a product's rows, found without writing the product: those of the product that is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.native import load_library
from engine.models.decoder import Decoder
from tests.engine.kernels.native.conftest import Make
from tests.engine.kernels.native.test_kernels import noise
from tests.engine.random_models import VARIANTS, write_model


def expected(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest = logits == logits.amax(-1, keepdim=True)
    # argmax may take any of equal ones: of booleans as numbers that fall from left to right, the first.
    first = (largest * torch.arange(logits.shape[-1], 0, -1)).argmax(-1)
    return first, logits.isfinite().all(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (41, 25), (7, 1), (64, 2000), (5, 1151)])
@pytest.mark.parametrize("threads", [1, 3])
def test_of_any_shape(make: Make, dtype: torch.dtype, inputs: int, outputs: int, threads: int) -> None:
    kernels = make(dtype, threads)
    # All negative at the end of the first case: what is behind the last column must not win.
    for bias in (None, noise(outputs, seed=2), noise(outputs, seed=2) - 100):
        head = kernels.prepare_head(noise(outputs, inputs, seed=1).to(dtype), bias)
        for rows in (1, 4, 9, 33, 300):
            x = noise(rows, inputs, seed=rows)
            found = kernels.peaks(head, x)
            assert found is not None
            assert all(map(torch.equal, found, expected(head(x))))


def test_of_equal_ones_the_first(make: Make) -> None:
    kernels = make(torch.float32, 3)
    weight = torch.zeros(999, 8)
    for places in ([998, 997], [3, 40], [8, 700], [25, 24, 500], list(range(999))):
        weight.zero_()
        weight[places] = 1.0
        found = kernels.peaks(kernels.prepare_head(weight, None), torch.ones(5, 8))
        assert found is not None
        assert found[0].tolist() == [min(places)] * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 30, 998])
def test_only_a_row_with_a_number_that_is_not_finite_is_reported(make: Make, value: float, place: int) -> None:
    kernels = make(torch.float32, 2)
    weight = noise(999, 8)
    weight[place] = 0
    weight[place, 0] = value
    x = torch.ones(3, 8)
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0])
    found = kernels.peaks(kernels.prepare_head(weight, None), x)
    assert found is not None
    assert not found[1].any()
    assert int(found[0].max()) < 999
    x[1, 0] = float("nan")
    found = kernels.peaks(kernels.prepare_head(noise(999, 8), None), x)
    assert found is not None
    assert found[1].tolist() == [True, False, True]


def test_a_head_that_another_set_has_prepared_takes_its_logits(make: Make) -> None:
    assert make(torch.float32, 1).peaks(torch.nn.Linear(8, 9), noise(2, 8)) is None


@pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")
@pytest.mark.parametrize("name", ["gqa", "mha"])
def test_greedy_requests_get_by_without_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = write_model(tmp_path / "one", seed=3, **VARIANTS[name])
    prompts = [[5, 6, 7], [9] * 40]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asking = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    with Engine.load(folder, EngineConfig(device="cpu", threads=1, kernels="native")) as engine:
        by_logits = [one.token_ids for one in engine.generate(prompts, asking)]
        monkeypatch.setattr(Decoder, "logits", None)
        assert [one.token_ids for one in engine.generate(prompts, greedy)] == by_logits
