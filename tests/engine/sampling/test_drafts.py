"""After each token of a draft the next is chosen as if those before it had come one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling import SamplingRows, sample
from tests.engine.sampling.sequences import sequence

VOCAB = 12
DRAFT = (4, 4, 7, 3)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.5, "temperature": 0.0},
        {"presence_penalty": 2.0, "temperature": 0.0},
        {"repetition_penalty": 3.0, "temperature": 0.0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3, "temperature": 1.0},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (4, 7)},
        {"temperature": 0.7, "logit_bias": ((4, 2.0),), "banned_token_ids": (7,), "logprobs": 2},
    ],
)
@pytest.mark.parametrize("words", [(), ((4, 7), (7, 3), (1, 4, 4), (4, 4, 7, 3, 5))])
def test_as_if_they_had_come_one_by_one(params: dict[str, Any], words: tuple[tuple[int, ...], ...]) -> None:
    # Tokens that have come or are guessed are the likeliest, so that it matters how often they were there.
    logits = torch.linspace(2.9, 3.1, VOCAB).repeat(2 * (len(DRAFT) + 1), 1)
    logits[:, [1, 3, 4, 5, 7]] += 0.5
    one = sequence(0, seed=5, prompt=(1, 3, 9), **params)
    other = sequence(1, seed=6, prompt=(2, 4), **params)
    for each in (one, other):
        each.bad_words = words
        each.tokens.append(1)
    rows = SamplingRows(4, VOCAB, torch.device("cpu"))
    # Counted before the step, as in a sequence that has been running.
    for each in (one, other):
        rows.admit(each)
        each.tokens.append(4)
    drafts = [DRAFT[:length] for length in range(len(DRAFT) + 1)] * 2
    found = sample(logits.clone(), rows.gather([one] * 5 + [other] * 5, drafts))
    alone = []
    for seq in (one, other):
        known = list(seq.tokens)
        for length in range(len(DRAFT) + 1):
            seq.tokens[:] = [*known, *DRAFT[:length]]
            fresh = SamplingRows(4, VOCAB, torch.device("cpu"))
            fresh.admit(seq)
            alone += sample(logits[:1].clone(), fresh.gather([seq]))
        seq.tokens[:] = known
    assert found == alone
    # What was guessed is not counted for good.
    again = sample(logits[:2].clone(), rows.gather([one, other]))
    assert again == [alone[0], alone[5]]
