"""Watermarks: a mark in the choice of tokens, which whoever has the key finds again (arXiv 2301.10226).

    a step's logits ─▶ `mark` adds delta to those of green tokens
    a text's tokens, with the key ─▶ `detect`: how many are green, and how likely that is by chance

A token is green if its hash with the row's key (`draws.bits`) is small. `engine.watermark` has the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.draws import bits
from engine.watermark import HASHES, WatermarkKey


def is_green(keys: Tensor, tokens: Tensor, limit: int) -> Tensor:
    """Whether tokens are green: bool. `keys`: int32 [..., 2], of `row_key`; `tokens`: int32, broadcast against
    keys[..., 0]."""
    return bits(keys, tokens).bitwise_and_(HASHES - 1) < limit


@dataclass(frozen=True, slots=True)
class Marks:
    """The rows of a step whose outputs are watermarked."""

    rows: list[int]
    keys: Tensor
    """int32 [rows, 2]: each row's `row_key`."""
    limits: list[int]
    deltas: list[float]


def mark(logits: Tensor, marks: Marks) -> None:
    """Add each row's delta to its green tokens' logits, fp32 [rows, vocabulary], in place: -inf stays. A row at a time,
    because a vocabulary's hashes stay in a core's cache, and a step's would not."""
    every = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    for row, key, limit, delta in zip(marks.rows, marks.keys, marks.limits, marks.deltas, strict=True):
        logits[row].add_(is_green(key, every, limit), alpha=delta)


@dataclass(frozen=True, slots=True)
class Detection:
    """The green share of a text. Two texts of one n-gram count it once each."""

    judged: int
    """The number of different n-grams: a token with its context."""
    green: int
    """Those of them whose token is green."""
    z: float
    """The standard score of that number; 0 where nothing was judged."""
    p: float
    """The probability of as many or more by chance: the binomial distribution's tail, exact. 1 for no tokens."""


def detect(key: WatermarkKey, tokens: Sequence[int]) -> Detection:
    """Judge a text by its token ids. Repeated n-grams count once, because chance decides them together. The first
    `key.context` tokens are not judged."""
    width = key.context + 1
    grams = dict.fromkeys(tuple(tokens[at : at + width]) for at in range(len(tokens) - key.context))
    judged = len(grams)
    if not judged:
        return Detection(0, 0, 0.0, 1.0)
    row_keys = {context: b"" for *start, _ in grams for context in (tuple(start),)}
    for context in row_keys:
        row_keys[context] = key.row_key(context)
    keys = np.frombuffer(b"".join(row_keys[gram[:-1]] for gram in grams), np.int32).reshape(-1, 2).copy()
    last = torch.tensor([gram[-1] for gram in grams], dtype=torch.int32)
    green = int(is_green(torch.from_numpy(keys), last, key.limit).sum())
    # The share that is green, as the limit has it.
    share = key.limit / HASHES
    z = (green - share * judged) / math.sqrt(judged * share * (1 - share))
    return Detection(judged, green, z, binomial_tail(judged, green, share))


def binomial_tail(n: int, least: int, share: float) -> float:
    """The probability of `least` or more of n events, each with the probability `share`."""
    if least <= 0:
        return 1.0
    if least <= n * share:  # the other tail is the small one, whose terms fall
        return 1.0 - _falling(n, n - least + 1, 1 - share)
    return _falling(n, least, share)


def _falling(n: int, least: int, share: float) -> float:
    """The same where the terms fall from `least` on."""
    if least > n:
        return 0.0
    log = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1)
    log += least * math.log(share) + (n - least) * math.log1p(-share)
    odds, term, total = share / (1 - share), 1.0, 1.0
    for k in range(least, n):
        term *= (n - k) / (k + 1) * odds
        total += term
        if term < 1e-17 * total:
            break
    return min(1.0, math.exp(log) * total)
