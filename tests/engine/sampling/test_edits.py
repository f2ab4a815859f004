"""Penalties, biases and bans through the permanent rows, against transformers' processors and plain definitions."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import SamplingRows, sample
from engine.sampling.rows import TokenCounts, edit
from engine.sequence import Sequence
from tests.engine.sampling.sequences import run, sequence
from tests.histories import examples

VOCAB = 60


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(rows: SamplingRows, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """The logits after the edits of this step."""
    logits = logits.clone()
    edits = rows.gather(sequences).edits
    if edits is not None:
        edit(logits, edits)
    return logits


def alone(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    rows = SamplingRows(1, VOCAB, torch.device("cpu"))
    one = sequence(0, **params)
    rows.admit(one)
    return edited(rows, logits[:1], [one])[0]


def by_definition(logits: torch.Tensor, one: Sequence) -> torch.Tensor:
    """Repetition over prompt and output, then frequency and presence over the output, a token at a time."""
    params, found = one.request.params, logits.double().clone()
    for token_id in set(one.tokens):
        value = found[token_id]
        found[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(one.tokens[one.prompt_len :]).items():
        found[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return found


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {},
    {"repetition_penalty": 0.5, "frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 2.0, "presence_penalty": 0.5, "temperature": 0.0},
]


@given(st.data())
@settings(max_examples=examples(6, 20), deadline=None)
def test_penalties_follow_the_tokens_through_steps_and_slots(data: st.DataObject) -> None:
    """Sequences grow, leave, come back after a preemption, and take over each other's rows."""
    rows = SamplingRows(len(PENALTIES), VOCAB, torch.device("cpu"))
    tokens = st.integers(0, VOCAB - 1)
    running: dict[int, Sequence] = {}
    for step in range(data.draw(st.integers(1, 8))):
        for slot, params in enumerate(PENALTIES):
            event = data.draw(st.sampled_from(["on", "on", "on", "new", "again"]))
            if event == "new" or slot not in running:
                prompt = tuple(data.draw(st.lists(tokens, min_size=1, max_size=400)))
                running[slot] = sequence(slot, prompt=prompt, **PENALTIES[(slot + step) % len(PENALTIES)] | params)
                rows.admit(running[slot])
            elif event == "again":
                rows.admit(running[slot])
        chosen = data.draw(st.permutations(sorted(running)))[: data.draw(st.integers(1, len(running)))]
        batch = [running[slot] for slot in chosen]
        logits = random_logits(len(batch), step)
        found = edited(rows, logits, batch)
        for row, one in enumerate(batch):
            torch.testing.assert_close(found[row].double(), by_definition(logits[row], one), atol=1e-5, rtol=1e-5)
            one.tokens.append(data.draw(tokens))


def test_a_step_done_again_counts_nothing_twice() -> None:
    rows = SamplingRows(1, VOCAB, torch.device("cpu"))
    one = sequence(0, prompt=(1,), frequency_penalty=1.0)
    rows.admit(one)
    for token_id in (5, 5, 6):
        one.tokens.append(token_id)
        logits = random_logits(1)
        first = edited(rows, logits, [one])
        assert torch.equal(edited(rows, logits, [one]), first)
    assert torch.equal((logits - first)[0].nonzero().view(-1), torch.tensor([5, 6]))


def same_counts(counts: TokenCounts, known: list[Counter[int]]) -> None:
    slots = np.arange(len(known))
    lengths, ids, found = counts.pairs(slots)
    pairs = list(zip(slots.repeat(lengths).tolist(), ids.tolist(), found.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {(slot, token, n) for slot in slots.tolist() for token, n in known[slot].items()}


@given(st.data())
@settings(max_examples=examples(12, 40), deadline=None)
def test_counts_stay_right_as_lists_outgrow_their_places_and_slots_begin_anew(data: st.DataObject) -> None:
    vocabulary, slots = 1000, 5
    counts, known = TokenCounts(slots, vocabulary), [Counter[int]() for _ in range(slots)]
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for slot in range(slots):
        counts.start(slot, np.zeros(0, np.int64), np.zeros(0, np.int64))
    for _ in range(data.draw(st.integers(1, 6))):
        slot = data.draw(st.integers(0, slots - 1))
        prompt = random.integers(0, vocabulary, data.draw(st.sampled_from([0, 10, 100, 900])))
        output = random.integers(0, vocabulary, data.draw(st.sampled_from([0, 1, 70])))
        counts.start(slot, prompt, output)
        known[slot] = Counter(dict.fromkeys(prompt.tolist(), 0))
        known[slot].update(output.tolist())
        same_counts(counts, known)
        for _ in range(data.draw(st.sampled_from([0, 1, 90]))):
            own = random.permutation(slots)[: random.integers(1, slots + 1)]
            tokens = random.integers(0, vocabulary, len(own))
            counts.grow(own, tokens)
            for one, token in zip(own.tolist(), tokens.tolist(), strict=True):
                known[one][token] += 1
        same_counts(counts, known)


def test_a_long_prompt_in_one_slot_takes_no_room_in_the_others() -> None:
    slots, distinct = 256, 100_000
    counts = TokenCounts(slots, distinct)
    for slot in range(slots):
        counts.start(slot, np.arange(10), np.arange(3))
    tracemalloc.start()
    counts.start(0, np.arange(distinct), np.arange(3))
    counts.start(1, np.arange(10), np.arange(3))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 * 8 * distinct


def test_biases_lists_and_bans_in_their_order() -> None:
    logits = random_logits(1)
    assert torch.equal(alone(logits), logits[0])
    biased = alone(logits, logit_bias={3: 2.5, 7: -100})
    assert torch.equal((biased - logits[0]).nonzero().view(-1), torch.tensor([3, 7]))
    assert float(biased[3] - logits[0, 3]) == pytest.approx(2.5)
    found = alone(logits, allowed_token_ids=[3, 5, 9], banned_token_ids=[5, 11], logit_bias={3: 1.0, 5: 100, 20: 100})
    assert found.isfinite().nonzero().view(-1).tolist() == [3, 9]
    assert float(found[3]) == pytest.approx(float(logits[0, 3]) + 1)
    # A penalty comes before a bias: it is not the biased logit that is divided.
    both = alone(logits, prompt=(3,), repetition_penalty=2.0, logit_bias={3: 10.0})
    plain = alone(logits, prompt=(3,), repetition_penalty=2.0)
    assert float(both[3]) == pytest.approx(float(plain[3]) + 10)


def test_a_row_without_a_token_left_fails_alone(device: torch.device) -> None:
    rows = [
        sequence(0, temperature=0.0),
        sequence(1, allowed_token_ids=[7], eos=(7,), min_tokens=3),
        sequence(2, banned_token_ids=list(range(VOCAB - 1))),
    ]
    found = run(random_logits(3), rows, device)
    assert [one.error is None for one in found] == [True, False, True]
    assert found[1].error is not None
    assert found[1].error.startswith("no token is left to choose")
    assert found[1].refused
    assert found[2].token_id == VOCAB - 1


def test_bad_words_are_banned_where_their_beginning_stands() -> None:
    def free(*tokens: int) -> set[int]:
        one = sequence(0, prompt=tokens)
        one.bad_words = ((4,), (5, 6), (1, 5, 7), (6, 5, 8), (9, 9, 9))
        rows = SamplingRows(1, VOCAB, torch.device("cpu"))
        rows.admit(one)
        logits = edited(rows, torch.zeros(1, VOCAB), [one])
        return set(range(VOCAB)) - set(logits[0].isfinite().nonzero().view(-1).tolist())

    assert free(1) == {4}
    assert free(5) == {4, 6}
    assert free(2, 5) == {4, 6}
    assert free(1, 5) == {4, 6, 7}
    assert free(6, 5) == {4, 6, 8}
    assert free(9) == {4}
    assert free(9, 9) == {4, 9}


def test_plain_rows_are_not_touched() -> None:
    rows = SamplingRows(2, VOCAB, torch.device("cpu"))
    plain = [sequence(0), sequence(1, temperature=0.0, eos=(3,))]
    for one in plain:
        rows.admit(one)
    batch = rows.gather(plain)
    assert batch.edits is None
    assert batch.draws is not None
    assert batch.draws.filters is None
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, batch)
    assert torch.equal(logits, before)
