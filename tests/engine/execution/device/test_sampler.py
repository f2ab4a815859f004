"""The device's sampler in plain torch chooses what engine.sampling chooses, from its permanent rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.device.plain_sampling import choose_plainly
from engine.execution.device.sampler import needs_host_token
from engine.kernels.sampling_state import Features
from engine.sampling.draws import choice_state, position_keys, row_keys
from tests.engine.conftest import DEVICES
from tests.engine.execution.device.choosing import (
    check_faults_of_one_row_alone,
    check_penalties_of_what_is_not_known,
    check_steps_and_slots,
    expected,
    new_sampler,
    random_logits,
    step,
)
from tests.engine.sampling.sequences import sequence
from tests.histories import examples

VOCAB, SLOTS = 97, 4


@pytest.mark.parametrize("where", DEVICES)
@given(data=st.data())
@settings(max_examples=examples(8, 25), deadline=None)
def test_it_chooses_what_engine_sampling_chooses_through_steps_and_slots(data: st.DataObject, where: str) -> None:
    sampler = new_sampler(SLOTS + 2, VOCAB, where, choose_plainly)
    steps, times = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    check_steps_and_slots(data, sampler, SLOTS, VOCAB, steps, times)


def test_penalties_count_what_the_host_has_not_seen() -> None:
    steps = [random_logits(1, VOCAB, number, 0.2) for number in range(4)]
    check_penalties_of_what_is_not_known(new_sampler(2, VOCAB, "cpu", choose_plainly), steps)


def test_log_probabilities_are_those_of_engine_sampling() -> None:
    logits = random_logits(4, VOCAB, 2).bfloat16()
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
    one, logits = sequence(1, temperature=0.0, logprobs=1), random_logits(2, VOCAB, 1)
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


def test_faults_are_of_one_row_alone() -> None:
    check_faults_of_one_row_alone(new_sampler(7, 200, "cpu", choose_plainly), random_logits(7, 200, 0))


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
