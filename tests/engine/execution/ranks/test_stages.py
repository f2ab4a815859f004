"""Layers in stages say what one process says, to the bit, with two steps of disjoint sequences in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine.adapters import load_adapter
from engine.errors import ModelError
from engine.kernels.native import load_library
from engine.models import load_model
from engine.models.registry import check_ranks_of
from engine.params import SamplingParams
from engine.plan import ScheduledSeq, StepPlan
from engine.speculate import Lookup, Speculation
from tests.engine.adapters.folders import write_adapter
from tests.engine.adapters.test_native import adapter_of
from tests.engine.execution.ranks.in_threads import ranks_of
from tests.engine.execution.ranks.test_parity import ODD_HEADS, SHAPES
from tests.engine.execution.ranks.test_quantised import SHAPE
from tests.engine.gguf_files import write_gguf
from tests.engine.quant.packers import write_quantised
from tests.engine.quant.test_checkpoints import FORMS, FP8_CONFIGS, _fp8
from tests.engine.random_models import FAMILIES, VARIANTS, write_model
from tests.exhaustive import few
from tests.parity.driver import Driver, greedy, prompts_of

pytestmark = pytest.mark.skipif(load_library() is None, reason="native kernels are not built for this CPU")

#: "wide-heads" has 3 heads.
CASES = [(name, 3 if name == "wide-heads" and ranks == 2 else ranks) for name in SHAPES for ranks in (1, 2)]
#: Tokens whose log-probabilities are told, and that some are drawn.
SCORED = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=7, temperature=0.9, seed=4, logprobs=1, prompt_logprobs=1, n=2, ignore_eos=True)


def answers(driver: Driver, *, plain: bool = False) -> tuple[dict[str, dict[int, list[int]]], dict[Any, list[float]]]:
    """Tokens, and log-probabilities by request and choice."""
    for i, prompt in enumerate(prompts_of([1, 17, 58, 5, 30], 320)):
        driver.add(str(i), prompt, greedy(6) if plain or i == 0 else DRAWN if i == 3 else SCORED)
    driver.run(preempt_every=None if plain else 7)
    scores: dict[Any, list[float]] = {}
    for event in driver.events:
        told = [entry.logprob for entry in [*(event.logprobs or []), *(event.prompt_logprobs or [])] if entry]
        scores.setdefault((event.request_id, event.choice), []).extend(told)
    return driver.found, scores


@pytest.mark.parametrize(
    ("name", "ranks"),
    few(CASES, ("biases", 1), ("gemma3", 1), ("phi3-longrope", 1), ("qwen3-moe", 1), ("gemma2", 2), ("mqa", 2)),
)
def test_stages_compute_what_one_stage_computes(name: str, ranks: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name])
    with ranks_of(folder, ranks, stages=1) as alone:
        one = alone.driver(tokens=40) if ranks > 1 else Driver(alone.shares[0], tokens=40)
        expected = answers(one)
    with ranks_of(folder, ranks, stages=2) as together:
        held = [
            {prefix + part for prefix, linear in share.linears() for part in linear.parts}
            for share in together.shares[::ranks]
        ]
        # Each stage is one native call, as one stage is.
        assert {share._together is None for share in together.shares} == {name == ODD_HEADS}
        tokens, scores = answers(together.driver(tokens=40))
        assert tokens == expected[0]
        # torch's operations, which this one needs, depend on the other rows.
        assert {k: pytest.approx(v, abs=1e-4) if name == ODD_HEADS else v for k, v in expected[1].items()} == scores
        assert answers(together.driver(tokens=40, overlap=0), plain=True)[0]["0"] == expected[0]["0"]
    assert all(held)
    assert not held[0] & held[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "ranks"), [(3, 1), (4, 1), (3, 2)])
@pytest.mark.parametrize("name", ["gqa", "gemma3"])
def test_more_stages_have_as_many_steps_in_flight(name: str, stages: int, ranks: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, seed=5, tokenizer=False, **SHAPES[name] | {"num_hidden_layers": 6})
    with ranks_of(folder, ranks, stages=1) as alone:
        expected = answers(alone.driver(tokens=40) if ranks > 1 else Driver(alone.shares[0], tokens=40))
    with ranks_of(folder, ranks, stages=stages) as together:
        assert answers(together.driver(tokens=40)) == expected


@pytest.mark.exhaustive
def test_as_many_stages_as_layers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", seed=5, tokenizer=False, num_hidden_layers=5)
    with ranks_of(folder, 1) as alone:
        expected = answers(Driver(alone.shares[0], tokens=40))
    with ranks_of(folder, 1, stages=5) as together:
        assert answers(together.driver(tokens=40)) == expected
    with pytest.raises(ModelError, match=r"pipeline_parallel=6 is more than its 5 layers"):
        check_ranks_of(folder, 1, 6)


@pytest.mark.parametrize("stages", few([2, 3], 3))
def test_each_stage_has_its_part_of_the_sequences(stages: int, tmp_path: Path) -> None:
    """They decode while the others wait for their tokens."""
    folder = write_model(tmp_path / "m", tokenizer=False, num_hidden_layers=3)
    with ranks_of(folder, 1, stages=stages) as together:
        driver = together.driver()
        for i, prompt in enumerate(prompts_of([8] * 6, 320)):
            driver.add(str(i), prompt, greedy(9))
        steps: list[set[str]] = []
        launch = driver.runner.launch

        def launched(plan: Any) -> Any:
            steps.append({row.seq.request.id for row in plan.rows})
            return launch(plan)

        driver.runner.launch = launched  # type: ignore[method-assign]
        driver.run()
    decodes = steps[6:-3]
    assert all(len(rows) == 6 // stages for rows in decodes)
    assert all(len(set().union(*decodes[i : i + stages])) == 6 for i in range(len(decodes) - stages + 1))


def test_guessed_tokens_change_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", seed=2, tokenizer=False, **FAMILIES["gemma3"])
    prompts = [[5, 6, 7, 8] * 8, [9, 8, 7] * 9]

    def run(driver: Driver) -> dict[str, list[int]]:
        for i, prompt in enumerate(prompts):
            driver.add(str(i), prompt, greedy(24))
        return driver.run()

    def guessing() -> dict[str, Any]:
        return {"speculation": Speculation(Lookup(8, 320), max_tokens=4, adaptive=False)}

    with ranks_of(folder, 1) as alone:
        expected = run(Driver(alone.shares[0]))
    with ranks_of(folder, 1, stages=2) as together:
        settings = guessing()
        assert run(together.driver(**settings)) == expected
    assert settings["speculation"].drafted > 0


def test_each_stage_has_its_part_of_an_adapter(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", tokenizer=False, **VARIANTS["gqa"])
    alone = load_model(folder, "float32", torch.device("cpu"), "native")
    adapter = adapter_of(alone, tmp_path / "a", rank=4, seed=1, every=1)
    # A change of the first stage alone.
    other = load_adapter(write_adapter(tmp_path / "b"), alone)

    def run(driver: Driver, first: Any, second: Any) -> dict[str, list[int]]:
        for i, (prompt, own) in enumerate(zip(prompts_of([20, 1, 33], 320), [first, None, second], strict=True)):
            driver.add(str(i), prompt, greedy(6), own)
        return driver.run()

    expected = run(Driver(alone), adapter, other)
    with ranks_of(folder, 1, stages=2) as together:
        first, second = (together.adapter(tmp_path / name, i) for i, name in enumerate("ab"))
        assert run(together.driver(), first, second) == expected
        assert (first.nbytes, second.nbytes) == (adapter.nbytes, other.nbytes), "one limit is of all stages"


def alike(folder: Path, ranks: int) -> None:
    """Stages of `ranks` ranks give what one stage of as many gives."""
    with ranks_of(folder, ranks, stages=1) as alone:
        expected = answers(alone.driver() if ranks > 1 else Driver(alone.shares[0]))
    with ranks_of(folder, ranks, stages=2) as together:
        assert answers(together.driver()) == expected


@pytest.mark.parametrize(
    ("form", "ranks"), few([(form, ranks) for form in [*FORMS, *FP8_CONFIGS] for ranks in (1, 2)], ("awq", 1))
)
def test_quantised_checkpoints_in_stages(form: str, ranks: int, tmp_path: Path) -> None:
    config, pack = FORMS[form] if form in FORMS else (FP8_CONFIGS[form], _fp8(form))
    write_quantised(tmp_path, config, pack, **SHAPE, num_key_value_heads=4)
    if "act-order" not in form or ranks == 1:
        alike(tmp_path / "packed", ranks)


@pytest.mark.parametrize(
    ("family", "kind"),
    few([("gqa", "Q8_0"), ("gqa", "F16"), ("gemma3", "Q8_0"), ("qwen2", "Q4_0"), ("phi3", "Q8_0")], ("gemma3", "Q8_0")),
)
def test_gguf_files_in_stages(family: str, kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **FAMILIES.get(family, {}) | SHAPE)
    alike(write_gguf(folder, tmp_path / "m.gguf", kind), 1)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_a_fault_before_a_step_is_sent_costs_no_rank(
    ranks: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", tokenizer=False)
    with ranks_of(folder, ranks, stages) as together:
        driver = together.driver()
        driver.add("a", [1, 2, 3], greedy(3))
        with monkeypatch.context() as patched:
            patched.setattr(driver.runner._sampling, "gather", Mock(side_effect=RuntimeError("of one request")))
            with pytest.raises(RuntimeError, match="of one request"):
                driver.step()
        plan = StepPlan([ScheduledSeq(seq, 0, 3, True) for seq in driver.scheduler._planner.running], num_tokens=3)
        assert len(driver.runner.collect(driver.runner.launch(plan))) == 1
