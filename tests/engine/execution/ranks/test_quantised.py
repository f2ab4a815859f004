"""Quantised checkpoints among ranks: a cut matrix stands for the part of the weights that it is cut from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelError
from engine.kernels.collectives import Collectives
from engine.kernels.native import load_library
from engine.kernels.native.exchange import Share
from engine.kernels.reference import Reference
from engine.models import load_model, shape_of
from engine.quant.formats import Matrix
from tests.engine.execution.ranks.in_threads import ranks_of
from tests.engine.gguf_files import write_gguf
from tests.engine.quant.packers import write_quantised
from tests.engine.quant.test_checkpoints import FORMS, FP8_CONFIGS, _fp8
from tests.engine.random_models import FAMILIES, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of, recorded

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

#: Heads and an inside whose halves and quarters are whole groups of 32.
SHAPE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 128}


def matrix(group: int, **parts: Any) -> Matrix:
    drawn = torch.Generator().manual_seed(group)
    groups = 64 // group
    q = torch.randint(16, (12, 64), generator=drawn, dtype=torch.uint8)
    zeros = torch.randint(16, (groups, 12), generator=drawn, dtype=torch.uint8)
    scales, minima = torch.rand(2, groups, 12, generator=drawn)
    return Matrix(4, q, scales, zeros if "zeros" in parts else None, None, minima if "minima" in parts else None)


@pytest.mark.parametrize("inputs", [range(64), range(16), range(16, 48), range(48, 64)])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("parts", [{}, {"zeros": True}, {"minima": True}])
def test_a_part_of_a_matrix_stands_for_that_part_of_the_weights(
    group: int, parts: dict[str, bool], inputs: range
) -> None:
    whole = matrix(group, **parts)
    own = whole.narrowed(range(3, 9), inputs)
    assert torch.equal(own.dequantise(), whole.dequantise()[3:9, inputs.start : inputs.stop])


def run(driver: Driver) -> dict[str, list[int]]:
    for i, prompt in enumerate(prompts_of([1, 30], 320)):
        driver.add(str(i), prompt, greedy(5))
    return driver.run()


def check(folder: Path, ranks: int) -> None:
    """The logits of one process and of ranks are close: kernels round rows too, by groups of inputs."""
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    logits = recorded(alone)
    expected = run(Driver(alone))
    with ranks_of(folder, ranks) as together:
        seen = recorded(together.lead)
        found = run(together.driver())
    for name, tokens in expected.items():
        assert found[name][0] == tokens[0]
    spread = float(logits[0].std())
    torch.testing.assert_close(seen[0], logits[0], rtol=0, atol=0.1 * spread)


@pytest.mark.parametrize(
    ("form", "ranks"),
    few(
        [(form, ranks) for form in [*FORMS, *FP8_CONFIGS] for ranks in (2, 4) if "act-order" not in form],
        *[("awq", 2), ("packed-8", 4), ("block", 2)],
    ),
)
def test_every_form_is_divided(form: str, ranks: int, tmp_path: Path) -> None:
    config, pack = FORMS[form] if form in FORMS else (FP8_CONFIGS[form], _fp8(form))
    write_quantised(tmp_path, config, pack, **SHAPE, num_key_value_heads=4)
    check(tmp_path / "packed", ranks)


@pytest.mark.parametrize("form", few([each for each in [*FORMS, *FP8_CONFIGS] if "act-order" not in each], "awq"))
def test_the_shape_of_a_share_alone_is_prepared_as_the_share_is(form: str, tmp_path: Path) -> None:
    """As kernels are compiled ahead: with scales and zero points, and without matrices."""
    config, pack = FORMS[form] if form in FORMS else (FP8_CONFIGS[form], _fp8(form))
    write_quantised(tmp_path, config, pack, **SHAPE, num_key_value_heads=4)
    prepared: list[list[tuple[Any, int]]] = []

    class Noted(Reference):
        def keeps(self, shape: Any, nbytes: int) -> None:
            prepared[-1].append((tuple(shape), nbytes))

    folder, end = tmp_path / "packed", Collectives(Share(1, 2), "gloo")
    for load in (partial(shape_of, collectives=end), partial(load_model, device=torch.device("cpu"), exchange=end)):
        prepared.append([])
        load(folder, "float32", kernels=Noted)
    assert prepared[0] == prepared[1] != []


@pytest.mark.parametrize(
    ("family", "kind"),
    few([("gqa", "Q8_0"), ("gqa", "F16"), ("gemma3", "Q8_0"), ("qwen2", "Q4_0"), ("phi3", "Q8_0")], ("gqa", "Q8_0")),
)
def test_gguf_files_are_divided(family: str, kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **FAMILIES.get(family, {}) | SHAPE)
    check(write_gguf(folder, tmp_path / "m.gguf", kind), 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_matrix_of_several_is_divided(ranks: int, tmp_path: Path) -> None:
    shape = FAMILIES["phi3"] | SHAPE
    write_quantised(tmp_path, *FORMS["awq"], **shape)
    check(tmp_path / "packed", ranks)


def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    write_quantised(tmp_path / "order", *FORMS["gptq-act-order"], **SHAPE)
    with (
        pytest.raises(ModelError, match=r"o_proj cannot be divided: .*desc_act"),
        ranks_of(tmp_path / "order/packed", 2),
    ):
        pass
