"""Samples tokens from logits: edits, greedy choice, draws, log probabilities, and one copy back to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import NOT_FINITE
from engine.logprobs import TokenLogprobs
from engine.plan import Sampled
from engine.sampling.edits import NONE_LEFT, edit
from engine.sampling.filters import narrow
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import REACH, gumbel
from engine.sampling.rows import Draws, SamplingBatch

#: The type of Kernels.candidates, which returns None if the kernel set has no such function.
Candidates = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor] | None]

#: On a CPU, noise is made for the candidates alone if they are at most this part of all tokens.
_SPARSE = 0.25


def sample(logits: Tensor, batch: SamplingBatch, candidates: Candidates = lambda *_: None) -> list[Sampled]:
    """Sample a token for each row of `logits`, [rows, vocabulary], which may be changed. `candidates`:
    Kernels.candidates.

    Only a row whose logits are not all finite, or that has no token left, gets an error. The host waits for the device
    only once, for the results.
    """
    logits = logits.float()
    # Two passes, because aminmax is 15 times slower on a CPU. Both pass NaN on.
    finite = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()
    # Log probabilities are those of the model's own logits, so they are taken before any edits.
    log_probs = None if batch.logprob_rows is None else logits[batch.logprob_rows].log_softmax(-1)
    faults = (~finite).long()
    if batch.edits is not None:
        edit(logits, batch.edits)
        if batch.edits.forbids:
            faults += 2 * (logits.amax(-1) == float("-inf")).long()
    tokens = logits.argmax(-1)
    if batch.draws is not None:
        tokens[batch.draws.rows] = draw(logits[batch.draws.rows], batch.draws, candidates)
    ids, fault_codes = torch.stack((tokens, faults)).tolist()
    logprobs = {} if log_probs is None else _logprobs(log_probs, tokens, ids, batch)
    return [
        failed(token, fault) if fault else Sampled(token, logprobs.get(row))
        for row, (token, fault) in enumerate(zip(ids, fault_codes, strict=True))
    ]


def chosen(tokens: Tensor, finite: Tensor) -> list[Sampled]:
    """The results of rows that take the most likely token. `tokens`: int64 [rows]; `finite`: bool [rows], both from
    Kernels.peaks."""
    return [
        Sampled(token) if sound else failed(token, 1)
        for token, sound in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


def failed(token: int, fault: int) -> Sampled:
    """The result of a row with a fault: 1 for logits that are not finite, else no token was left."""
    if fault & 1:
        return Sampled(token, error=NOT_FINITE)
    return Sampled(token, error=NONE_LEFT, refused=True)


def draw(logits: Tensor, draws: Draws, candidates: Candidates = lambda *_: None) -> Tensor:
    """Draw a token for each row of `logits`, fp32 [draws, vocabulary], by Gumbel-max. Returns int64 [draws]."""
    scaled = logits / draws.temperature
    threshold = None if draws.filters is None else narrow(scaled, draws.filters)
    near = candidates(scaled, threshold, draws.keys)
    if near is not None:
        rows, tokens = near
        noisy = scaled[rows, tokens] + gumbel(draws.keys[rows, 0], tokens.to(torch.int32))
        return _largest(rows, tokens, noisy, scaled.shape)
    if scaled.device.type == "cpu":
        # Also leave out tokens that no noise could make the largest.
        reach = scaled.amax(-1, keepdim=True) - REACH
        kept = scaled >= (reach if threshold is None else torch.maximum(threshold, reach))
        rows, tokens = kept.nonzero(as_tuple=True)
        if len(rows) <= _SPARSE * scaled.numel():
            noisy = scaled[rows, tokens] + gumbel(draws.keys[rows, 0], tokens.to(torch.int32))
            return torch.full_like(scaled, float("-inf")).index_put_((rows, tokens), noisy).argmax(-1)
    every = torch.arange(scaled.shape[-1], dtype=torch.int32, device=scaled.device)
    noisy = gumbel(draws.keys, every).add_(scaled)
    if threshold is not None:
        noisy = noisy.masked_fill_(scaled < threshold, float("-inf"))
    return noisy.argmax(-1)


def _largest(rows: Tensor, tokens: Tensor, noisy: Tensor, shape: torch.Size) -> Tensor:
    """The token of each row with the largest `noisy` value, the first of equal ones. Any token if it is NaN."""
    best = noisy.new_full(shape[:1], float("-inf")).scatter_reduce_(0, rows, noisy, "amax")
    last = shape[-1] - 1
    return torch.full_like(best, last, dtype=torch.int64).scatter_reduce_(
        0, rows, tokens.where(noisy == best[rows], last), "amin"
    )


def _logprobs(log_probs: Tensor, tokens: Tensor, ids: list[int], batch: SamplingBatch) -> dict[int, TokenLogprobs]:
    """The log probabilities by row. `log_probs`: [rows that want them, vocabulary]. `tokens`: int64 [rows], the chosen
    tokens; `ids`: the same on the host."""
    rows, counts = list(batch.logprob_counts), list(batch.logprob_counts.values())
    logprobs = token_logprobs(log_probs, tokens[batch.logprob_rows], [ids[row] for row in rows], counts)
    return dict(zip(rows, logprobs, strict=True))
