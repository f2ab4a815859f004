"""What is sampled is distributed as the filters' definitions say: chi-square against a plain computation in fp64.

The seeds are fixed, so that a test passes always or never. Each has a chance of one in ten thousand to have been
unlucky with its seed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling import SamplingRows, sample
from engine.sampling.draws import row_keys
from tests.engine.sampling.sequences import sequence

VOCAB = 40
DRAWS = 8000
LEAST = 1e-4

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 6},
    {"top_p": 0.75},
    {"min_p": 0.15},
    {"typical_p": 0.6},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.5, "presence_penalty": 1.0},
    {"logit_bias": {0: 2.0, 1: -3.0, 2: 100.0, 3: -100.0}, "temperature": 30.0},
    {"allowed_token_ids": list(range(0, 40, 3)), "banned_token_ids": [6, 9], "top_p": 0.95},
]
PROMPT, OUTPUT = (3, 5, 7, 7), [7, 11, 11, 11, 13]


def probabilities(logits: list[float], params: dict[str, Any]) -> list[float]:
    """The definitions, one after the other, in plain floats."""
    x = list(logits)
    penalty = params.get("repetition_penalty", 1.0)
    for token_id in {*PROMPT, *OUTPUT}:
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id in set(OUTPUT):
        x[token_id] -= params.get("frequency_penalty", 0) * OUTPUT.count(token_id) + params.get("presence_penalty", 0)
    for token_id, bias in params.get("logit_bias", {}).items():
        x[token_id] += bias
    allowed = set(params.get("allowed_token_ids", range(VOCAB))) - set(params.get("banned_token_ids", []))
    p = softmax([value / params.get("temperature", 1.0) if i in allowed else -math.inf for i, value in enumerate(x)])
    if "top_k" in params:
        p = keep(p, sorted(range(VOCAB), key=lambda i: -p[i])[: params["top_k"]])
    if "top_p" in params:
        p = keep(p, until(p, sorted(range(VOCAB), key=lambda i: -p[i]), params["top_p"]))
    if "min_p" in params:
        p = keep(p, [i for i in range(VOCAB) if p[i] >= params["min_p"] * max(p)])
    if "typical_p" in params:
        entropy = -sum(q * math.log(q) for q in p if q)
        nearest = sorted((i for i in range(VOCAB) if p[i]), key=lambda i: abs(-math.log(p[i]) - entropy))
        p = keep(p, until(p, nearest, params["typical_p"]))
    return p


def softmax(x: list[float]) -> list[float]:
    weights = [math.exp(value - max(x)) for value in x]
    return [weight / math.fsum(weights) for weight in weights]


def until(p: list[float], order: list[int], mass: float) -> list[int]:
    """The first of these whose probabilities reach `mass`."""
    total = 0.0
    for count, i in enumerate(order, start=1):
        total += p[i]
        if total >= mass:
            return order[:count]
    return order


def keep(p: list[float], kept: list[int]) -> list[float]:
    total = math.fsum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(VOCAB)]


def p_value(observed: list[int], expected: list[float]) -> float:
    """Of Pearson's chi-square; bins that expect fewer than five are put together."""
    pairs = sorted(zip(expected, observed, strict=True), reverse=True)
    bins = [list(pair) for pair in pairs if pair[0] >= 5]
    rest = [sum(column) for column in zip(*(pair for pair in pairs if pair[0] < 5), strict=True)] or [0.0, 0]
    if rest[0] >= 5:
        bins.append(rest)
    else:
        bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    if len(bins) == 1:
        return 1.0
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("params", CASES, ids=lambda params: "-".join(params) or "plain")
def test_draws_are_distributed_as_defined(params: dict[str, Any], device: torch.device) -> None:
    logits = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5).tolist()
    rows = SamplingRows(1, VOCAB, device)
    first = sequence(0, prompt=PROMPT, seed=5, **params)
    first.tokens += OUTPUT
    rows.admit(first)
    batch = rows.gather([first] * DRAWS)
    # Every draw gets the noise of a position of its own: as many steps would be slow.
    positions = np.arange(DRAWS, dtype=np.uint64)
    keys = row_keys(np.full_like(positions, 5), np.zeros_like(positions), positions)
    assert batch.draws is not None
    batch.draws.keys.copy_(torch.from_numpy(keys)[:, None])
    drawn = sample(torch.tensor([logits] * DRAWS, device=device), batch)
    expected = probabilities(logits, params)
    observed = [0] * VOCAB
    for one in drawn:
        observed[one.token_id] += 1
    assert not any(seen for seen, chance in zip(observed, expected, strict=True) if not chance)
    assert p_value(observed, [DRAWS * chance for chance in expected]) > LEAST


def test_the_measure_sees_a_small_difference() -> None:
    """Else the tests above could not fail: frequencies a fifth off are refused."""
    even = [DRAWS / VOCAB] * VOCAB
    tilted = [round(share * (1.2 if i % 2 else 0.8)) for i, share in enumerate(even)]
    assert p_value([round(share) for share in even], even) > 0.9
    assert p_value(tilted, even) < 1e-9
