"""The device's sampler in plain torch chooses what engine.sampling chooses, from its permanent rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.device.plain_sampling import choose_plainly
from engine.execution.device.sampler import needs_host_token
from engine.kernels.sampling_state import Features
from engine.sampling.noise import choice_state, position_keys, row_keys
from engine.sequence import Sequence
from tests.engine.conftest import DEVICES
from tests.engine.execution.device.choosing import assert_agree, expected, new_sampler, running, step
from tests.engine.sampling.sequences import sequence
from tests.histories import examples

VOCAB, SLOTS = 97, 4


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("where", DEVICES)
@given(data=st.data())
@settings(max_examples=examples(8, 25), deadline=None)
def test_it_chooses_what_engine_sampling_chooses_through_steps_and_slots(data: st.DataObject, where: str) -> None:
    """Sequences grow, leave, come back after a preemption, and take over each other's rows; some steps are done
    again."""
    sampler = new_sampler(SLOTS, VOCAB, where, choose_plainly)
    present: dict[int, Sequence] = {}
    for number in range(data.draw(st.integers(1, 5))):
        for slot in range(SLOTS):
            if slot not in present or data.draw(st.integers(0, 4)) == 0:
                present[slot] = data.draw(running(slot, VOCAB))
        batch = [present[slot] for slot in data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]]
        logits = random_logits(len(batch), number).to(where)
        for _ in range(data.draw(st.integers(1, 2))):
            found = step(sampler, logits, batch, padding=data.draw(st.integers(0, 1)) if len(batch) < SLOTS else 0)
            assert_agree(logits, batch, found)
        for one, result in zip(batch, found, strict=True):
            assert int(sampler.state.last_tokens[one.slot]) == result.token_id
            one.tokens.append(result.token_id)


def test_penalties_count_what_the_host_has_not_seen() -> None:
    """Three steps are launched before the first is collected; a placeholder stands for what is not known."""
    params: dict[str, Any] = {"seed": 3, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "temperature": 0.7}
    ahead, behind = [sequence(0, prompt=(5, 6, 7), **params) for _ in range(2)]
    sampler = new_sampler(1, VOCAB, "cpu", choose_plainly)
    drawn = []
    for number in range(3):
        logits = random_logits(1, number) * 0.2
        features = sampler.admit([ahead])
        sampler.launch(logits, torch.tensor([0]), torch.tensor([len(ahead.tokens) - 1]), features)
        drawn.append(sampler.fetch(logits, [ahead]))
        ahead.tokens.append(-1)
    for number, one in enumerate(drawn):
        (theirs,) = expected(random_logits(1, number) * 0.2, [behind])
        assert sampler.collect(one)[0].token_id == theirs.token_id
        behind.tokens.append(theirs.token_id)


def test_log_probabilities_are_those_of_engine_sampling() -> None:
    logits = random_logits(4, 2).bfloat16()
    rows = [
        sequence(0, temperature=0.0, logprobs=3),
        sequence(1, temperature=0.0),
        sequence(2, temperature=1.7, top_k=2, logprobs=0),
        sequence(3, temperature=0.0, logit_bias={5: 100.0}, logprobs=20),
    ]
    found = step(new_sampler(4, VOCAB, "cpu", choose_plainly), logits, rows, padding=0)
    for ours, theirs in zip(found, expected(logits, rows), strict=True):
        assert ours == theirs
    assert found[3].logprobs is not None
    assert len(found[3].logprobs.top) == 20


def test_results_stay_when_the_next_step_is_launched_before_they_are_collected() -> None:
    sampler = new_sampler(2, VOCAB, "cpu", choose_plainly)
    one, logits = sequence(1, temperature=0.0, logprobs=1), random_logits(2, 1)
    for row in range(2):
        sampler.launch(logits[row : row + 1], torch.tensor([1]), torch.tensor([2]), sampler.admit([one]))
        if row == 0:
            first = sampler.fetch(logits[:1], [one])
    assert sampler.collect(first)[0].token_id == int(logits[0].argmax())


def test_a_step_asks_only_for_what_its_rows_ask() -> None:
    sampler = new_sampler(4, VOCAB, "cpu", choose_plainly)
    assert sampler.state.edits is None
    plain = [sequence(0), sequence(1, temperature=0.0, top_p=0.5, eos=(3,))]
    assert sampler.admit(plain) == Features(0)
    assert sampler.state.edits is None
    filtered, edited = sequence(2, min_p=0.1), sequence(3, temperature=0.0, presence_penalty=1.0)
    assert sampler.admit([*plain, filtered]) == Features.FILTERS
    assert sampler.admit([edited]) == Features.EDITS
    assert sampler.admit([edited, filtered]) == Features.EDITS | Features.FILTERS
    assert sampler.state.edits is not None
    assert sampler.admit(plain) == Features(0)


def test_nothing_is_sent_for_a_row_that_goes_on() -> None:
    sampler, one = new_sampler(1, VOCAB, "cpu", choose_plainly), sequence(0, top_k=5, repetition_penalty=1.2)
    sampler.admit([one])
    sampler.state.table[0, 0] = 77
    one.tokens.append(4)
    sampler.admit([one])
    assert int(sampler.state.table[0, 0]) == 77
    sampler.forget()
    sampler.admit([one])
    assert int(sampler.state.table[0, 0]) != 77


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_faults_are_of_one_row_alone(rubbish: float) -> None:
    logits = random_logits(4, 0)
    logits[1, 20] = rubbish
    rows = [sequence(i, seed=i, top_p=0.9) for i in range(3)] + [
        sequence(3, allowed_token_ids=[7], eos=(7,), min_tokens=3)
    ]
    found = step(new_sampler(4, VOCAB, "cpu", choose_plainly), logits, rows)
    assert_agree(logits, rows, found)
    assert [one.error is None for one in found] == [True, False, True, False]
    assert [one.refused for one in found] == [False, False, False, True]
    assert all(0 <= one.token_id < VOCAB for one in found)


def test_keys_made_on_the_device_are_the_hosts() -> None:
    seeds = np.array([0, 42, (1 << 63) - 1, 7], np.uint64)
    choices = np.array([0, 3, 63, 1], np.uint64)
    positions = np.array([0, 17, 1 << 40, 3], np.uint64)
    state = torch.from_numpy(choice_state(seeds, choices).view(np.int64))
    found = position_keys(state, torch.from_numpy(positions.view(np.int64)))
    assert np.array_equal(found.numpy(), row_keys(seeds, choices, positions))


def test_words_of_several_tokens_need_the_hosts_eyes() -> None:
    one = sequence(0)
    assert not needs_host_token(one)
    one.bad_words = ((3,), (4,))
    assert not needs_host_token(one)
    one.bad_words = ((3,), (4, 5))
    assert needs_host_token(one)


def test_a_word_is_allowed_again_where_its_beginning_no_longer_stands() -> None:
    sampler, one = new_sampler(1, VOCAB, "cpu", choose_plainly), sequence(0, prompt=(5,), temperature=0.0)
    one.bad_words = ((5, 6), (5, 5, 7))
    logits = torch.zeros(1, VOCAB)
    logits[:, 6], logits[:, 7], logits[:, 8] = 9.0, 8.0, 7.0
    # After 5; 5, 5; 5, 5, 4; ... 4, 5.
    for likeliest, then in ((7, 5), (8, 4), (6, 5), (7, 4), (6, 4)):
        assert step(sampler, logits, [one])[0].token_id == likeliest
        one.tokens.append(then)
