"""The sampling kernels choose what engine.sampling chooses, from the device's permanent rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.execution.device.sampler import DeviceSampler
from engine.sequence import Sequence
from tests.engine.execution.device import choosing
from tests.engine.execution.device.choosing import (
    assert_agree,
    check_faults_of_one_row_alone,
    check_penalties_of_what_is_not_known,
    check_steps_and_slots,
    new_sampler,
    step,
)
from tests.engine.sampling.sequences import sequence
from tests.engine.sampling.test_distributions import CASES, LEAST, OUTPUT, PROMPT, p_value, probabilities
from tests.exhaustive import few
from tests.histories import examples

pytest.importorskip("triton")

from engine.kernels.triton.sampling.sampler import Tiles, TritonChoose

pytestmark = [
    pytest.mark.usefixtures("where"),
    # The interpreter's numpy says so where a number becomes infinite or is none, as it is meant to.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Several of each for the small vocabularies of these tests.
SMALL, OTHER = Tiles(chunk=64, tile=128, room=32), Tiles(chunk=256, tile=512, room=128)


def sampler_of(slots: int, vocab: int, tiles: Tiles | None = SMALL) -> DeviceSampler:
    """With two slots more, whose rows may be padding."""
    return new_sampler(slots + 2, vocab, WHERE, TritonChoose(slots + 2, vocab, WHERE, tiles))


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return choosing.random_logits(rows, vocab, seed, spread).to(WHERE)


# Hypothesis explains and shrinks with a tracer on, in which an interpreted kernel takes minutes.
@given(st.data())
@settings(max_examples=30 if WHERE.type == "cuda" else examples(2, 4), deadline=None, phases=[Phase.generate])
def test_any_mix_of_parameters_through_steps_and_slots(data: st.DataObject) -> None:
    check_steps_and_slots(data, sampler_of(3, 97), 3, 97, steps=2, times=1)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 40, "top_p": 0.9, "temperature": 0.7},
    {"seed": 3, "min_p": 0.05, "typical_p": 0.6, "top_p": 0.99},
    {"seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2},
    {"seed": 5, "logit_bias": {3: 4.0, 900: -3.0, 41: 100.0}, "banned_token_ids": [41], "top_k": 900},
    {"temperature": 0.0, "allowed_token_ids": list(range(0, 1000, 7))},
]


def mixed(**more: Any) -> list[Sequence]:
    made = []
    for slot, params in enumerate(MIXED):
        rest = {key: value for key, value in (params | more).items() if key != "seed"}
        one = sequence(slot, seed=params.get("seed", 0), prompt=(1, 2, 3, slot), **rest)
        one.tokens += [11, slot, 11]
        made.append(one)
    return made


@pytest.mark.parametrize(
    ("vocab", "dtype", "tiles"),
    few([(1000, torch.float32, OTHER), (4096, torch.bfloat16, None)], (4096, torch.bfloat16, None)),
)
def test_logits_of_each_size_and_dtype(vocab: int, dtype: torch.dtype, tiles: Tiles | None) -> None:
    # A column more than the vocabulary: rows need not follow each other.
    logits = random_logits(len(MIXED), vocab + 1, vocab).to(dtype)[:, :vocab]
    rows = mixed()
    assert_agree(logits, rows, step(sampler_of(len(MIXED), vocab, tiles), logits, rows))


def test_of_equal_logits_the_lowest_token_is_taken() -> None:
    logits = torch.zeros(3, 200, device=WHERE)
    logits[0, [70, 130, 199]] = 5.0
    logits[1, [3, 64]] = 5.0
    rows = [sequence(0, temperature=0.0), sequence(1, temperature=0.0, banned_token_ids=[3, 7])]
    rows.append(sequence(2, temperature=0.0, logit_bias={150: 1.0, 90: 1.0}))
    assert [one.token_id for one in step(sampler_of(3, 200), logits, rows)] == [70, 64, 90]


def test_faults_are_of_one_row_alone() -> None:
    check_faults_of_one_row_alone(sampler_of(7, 200), random_logits(7, 200, 0))


def test_rows_of_nothing_but_rubbish_end() -> None:
    logits = torch.full((2, 200), float("nan"), device=WHERE)
    logits[1] = float("inf")
    rows = [sequence(0, top_p=0.5, top_k=3, typical_p=0.5), sequence(1, top_p=0.5, top_k=3, typical_p=0.5)]
    assert [one.error is None for one in step(sampler_of(2, 200), logits, rows)] == [False, False]


def test_penalties_count_what_the_host_has_not_seen() -> None:
    check_penalties_of_what_is_not_known(sampler_of(2, 97), [random_logits(1, 97, number, 0.2) for number in range(4)])


@pytest.mark.parametrize("params", CASES if WHERE.type == "cuda" else CASES[:1], ids=lambda params: "-".join(params))
def test_draws_are_distributed_as_defined(params: dict[str, Any]) -> None:
    """Few, and without filters, in the interpreter: the tests above compare with engine.sampling, draw by draw."""
    vocab, rows = 40, 50
    draws = 8000 if WHERE.type == "cuda" else 100
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 1.5).to(WHERE)
    sampler = sampler_of(rows, vocab)
    present = [sequence(slot, prompt=PROMPT, seed=5, **params) for slot in range(rows)]
    for one in present:
        one.tokens += OUTPUT
    expected, observed = probabilities(logits.tolist(), params), [0] * vocab
    for start in range(0, draws, rows):
        sampler.forget()  # penalties count what was drawn before
        features = sampler.admit(present)
        # Every draw gets the noise of a position of its own.
        positions = torch.arange(start, start + rows, device=WHERE)
        chosen = sampler.launch(logits.expand(rows, -1), torch.arange(rows, device=WHERE), positions, features)
        for token in chosen[0].tolist():
            observed[token] += 1
    assert not any(seen for seen, chance in zip(observed, expected, strict=True) if not chance)
    assert p_value(observed, [draws * chance for chance in expected]) > LEAST


@pytest.mark.cuda
def test_a_recorded_launch_is_replayed_for_other_sequences_and_positions() -> None:
    rows = len(MIXED)
    sampler, present = sampler_of(rows, 1000), mixed()
    logits = random_logits(rows, 1000, 8)
    features = sampler.admit(present)
    nobody = torch.full((rows,), -1, dtype=torch.int32, device=WHERE)
    slots, positions = nobody.clone(), torch.zeros(rows, dtype=torch.int64, device=WHERE)
    sampler.launch(logits, slots, positions, features)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.launch(logits, slots, positions, features)
    for turn in range(3):
        order = present[turn:] + present[:turn]
        sampler.admit(order)
        slots.copy_(torch.tensor([one.slot for one in order]))
        positions.copy_(torch.tensor([len(one.tokens) - 1 for one in order]))
        graph.replay()
        found = sampler.collect(sampler.fetch(logits, order))
        assert_agree(logits, order, found)
        for one, result in zip(order, found, strict=True):
            one.tokens.append(result.token_id)
