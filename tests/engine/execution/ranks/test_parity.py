"""A model that 2 or 4 ranks compute says what one process says: logits and greedy tokens, of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.native import load_library
from engine.models import load_model
from tests.engine.execution.ranks.in_threads import ranks_of
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of, recorded

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

#: Logits in fp32 that differ by less differ by the order of sums.
_CLOSE = 2e-4
#: Heads that the native call of all layers does not take.
ODD_HEADS = "odd-heads"
SHAPES = VARIANTS | FAMILIES | {ODD_HEADS: FAMILIES["gemma3"] | {"head_dim": 12}}
#: "wide-heads" has 3 heads.
CASES = [(name, ranks) for name in SHAPES for ranks in (2, 3, 4) if (ranks == 3) == (name == "wide-heads")]


def run(driver: Driver, prompts: list[list[int]]) -> dict[str, list[int]]:
    for i, prompt in enumerate(prompts):
        driver.add(str(i), prompt, greedy(6))
    return driver.run()


@pytest.mark.parametrize(
    ("name", "ranks"),
    few(
        CASES,
        *[("biases", 2), ("gemma3", 2), ("phi3-longrope", 2), ("qwen3-moe", 2), (ODD_HEADS, 2)],
        *[("qwen2-window", 4), ("mqa", 4)],
    ),
)
def test_ranks_compute_what_one_process_computes(name: str, ranks: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name])
    prompts = prompts_of([1, 17, 58], 320)
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    greedy_alone = run(Driver(alone, tokens=40), prompts)
    logits = recorded(alone)
    run(Driver(alone, tokens=40), prompts)
    with ranks_of(folder, ranks) as together:
        assert run(together.driver(tokens=40), prompts) == greedy_alone
        seen = recorded(together.lead)
        assert run(together.driver(tokens=40), prompts) == greedy_alone
    assert len(seen) == len(logits)
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=_CLOSE)


@pytest.mark.parametrize(
    ("name", "ranks"), few([case for case in CASES if case[1] != 3], ("gemma3", 2), ("qwen3-moe", 4))
)
def test_ranks_of_two_machines_compute_the_bits_of_as_many_on_one(name: str, ranks: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name])
    prompts = prompts_of([1, 17, 58], 320)
    runs = []
    for machines in (1, 2):
        with ranks_of(folder, ranks, machines=machines) as together:
            logits = recorded(together.lead)
            runs.append((run(together.driver(tokens=40), prompts), logits))
    (tokens, logits), (others_tokens, others_logits) = runs
    assert others_tokens == tokens
    assert len(others_logits) == len(logits)
    assert all(map(torch.equal, others_logits, logits))


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_each_rank_has_its_part_of_a_narrow_cache(cache: str, tmp_path: Path) -> None:
    """Each key and each value of a head is rounded by itself, on whichever rank."""
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, **VARIANTS["gqa"])
    prompts = prompts_of([1, 40], 320)
    alone = load_model(folder, "float32", torch.device("cpu"), "native", kv_cache_dtype=cache)
    logits = recorded(alone)
    run(Driver(alone), prompts)
    with ranks_of(folder, 2, kv_cache_dtype=cache) as together:
        seen = recorded(together.lead)
        run(together.driver(), prompts)
    torch.testing.assert_close(seen[0], logits[0], rtol=0, atol=0.05)
