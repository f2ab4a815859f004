"""Logits to tokens, through the permanent rows: each sequence's own parameters, whoever runs beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.sampling import SamplingRows, sample
from engine.sampling import sampler as sampler_module
from engine.sequence import Sequence
from tests.engine.sampling.sequences import run, sequence

VOCAB = 200


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_0_takes_the_likeliest(device: torch.device) -> None:
    logits = random_logits(4)
    found = run(logits, [sequence(i, temperature=0.0) for i in range(4)], device)
    assert [one.token_id for one in found] == logits.argmax(-1).tolist()
    assert all(one.error is None and one.logprobs is None for one in found)


def test_a_hair_above_0_is_greedy_too(device: torch.device) -> None:
    logits = random_logits(1)
    assert run(logits, [sequence(0, temperature=1e-30)], device)[0].token_id == int(logits.argmax())


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 2.0, "seed": 4, "top_k": 50, "top_p": 0.6},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 5.0, "seed": 1, "top_k": 1000},
]


def mixed() -> list[Sequence]:
    return [
        sequence(i, length=i + 2, seed=params.get("seed", 0), **{k: v for k, v in params.items() if k != "seed"})
        for i, params in enumerate(MIXED)
    ]


def test_noise_for_candidates_alone_chooses_what_noise_for_all_would(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(MIXED))
    found = []
    for part in (0.0, 1.0):
        monkeypatch.setattr(sampler_module, "_SPARSE", part)
        found.append([one.token_id for one in run(logits, mixed())])
    assert found[0] == found[1]


def test_seed_choice_and_position_each_give_other_tokens() -> None:
    logits = torch.zeros(1, VOCAB)

    def tokens(**who: int) -> list[int]:
        base = {"seed": 5, "choice": 0}
        rows = [sequence(0, **(base | who), length=n) for n in range(2, 22)]
        return [run(logits, [row])[0].token_id for row in rows]

    base = tokens()
    assert tokens() == base
    assert tokens(seed=6) != base
    assert tokens(choice=1) != base
    assert len(set(base)) > 10


def test_the_largest_seed_is_a_seed() -> None:
    logits = torch.zeros(1, VOCAB)
    assert run(logits, [sequence(0, seed=(1 << 63) - 1)])[0].error is None


def test_tokens_that_would_end_too_early_are_banned(device: torch.device) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 50.0
    logits[:, 8] = 49.0
    rows = [
        sequence(0, temperature=0.0, eos=(7, 5000), min_tokens=1),
        sequence(1, temperature=1.0, eos=(7,), min_tokens=1, stop_token_ids=[8]),
        sequence(2, temperature=0.0, eos=(7,)),
    ]
    found = [one.token_id for one in run(logits, rows, device)]
    assert found[0] == 8
    assert found[1] not in (7, 8)
    assert found[2] == 7


def test_the_ban_ends_when_enough_tokens_are_there() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 7] = 50.0
    row = sequence(0, temperature=0.0, eos=(7,), min_tokens=1)
    row.tokens.append(3)
    assert run(logits, [row])[0].token_id == 7


def test_logprobs_are_of_the_models_own_distribution(device: torch.device) -> None:
    logits = random_logits(4)
    said = logits.double().log_softmax(-1)
    rows = [
        sequence(0, temperature=0.0, logprobs=3),
        sequence(1, temperature=0.0),
        sequence(2, temperature=1.7, top_k=2, logprobs=0),
        # What is banned was still said.
        sequence(3, temperature=0.0, logprobs=2, eos=(int(logits[3].argmax()),), min_tokens=4),
    ]
    found = run(logits, rows, device)
    assert found[1].logprobs is None
    for i, count in ((0, 3), (2, 0), (3, 2)):
        listed = found[i].logprobs
        assert listed is not None
        assert listed.token_id == found[i].token_id
        assert math.isclose(listed.logprob, said[i, found[i].token_id], abs_tol=1e-4)
        best = said[i].topk(count)
        assert [token for token, _ in listed.top] == best.indices.tolist()
        assert all(math.isclose(p, q, abs_tol=1e-4) for (_, p), q in zip(listed.top, best.values, strict=True))
    assert found[3].logprobs is not None
    assert found[3].logprobs.top[0][0] != found[3].token_id


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(device: torch.device, rubbish: float) -> None:
    logits = random_logits(3)
    expected = [one.token_id for one in run(logits, [sequence(i, seed=i, top_p=0.9) for i in range(3)], device)]
    logits[1, 20] = rubbish
    found = run(logits, [sequence(i, seed=i, top_p=0.9, logprobs=1) for i in range(3)], device)
    assert "not finite" in (found[1].error or "")
    assert [found[0].token_id, found[2].token_id] == [expected[0], expected[2]]
    assert found[0].error is found[2].error is None


def test_half_precision_logits_are_widened_first(device: torch.device) -> None:
    logits = random_logits(1).bfloat16()
    row = sequence(0, temperature=0.0, logprobs=1)
    listed = run(logits, [row], device)[0].logprobs
    assert listed is not None
    assert math.isclose(listed.logprob, logits.float().log_softmax(-1).max(), abs_tol=1e-4)


def test_a_slot_is_its_new_owners() -> None:
    rows = SamplingRows(1, VOCAB, torch.device("cpu"))
    logits = random_logits(1)
    first = sequence(0, temperature=2.0, seed=1, top_k=3, min_tokens=3, eos=(int(logits.argmax()),), logprobs=4)
    rows.admit(first)
    sample(logits, rows.gather([first]))
    second = sequence(0, temperature=0.0)
    rows.admit(second)
    found = sample(logits, rows.gather([second]))[0]
    assert (found.token_id, found.logprobs) == (int(logits.argmax()), None)
