"""Samples tokens from logits: edits, greedy choice, draws, log probabilities, and one copy back to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.beams import Continuation
from engine.errors import NONE_LEFT, NOT_FINITE
from engine.kernels.upload import upload
from engine.params import MAX_LOGPROBS
from engine.plan import Sampled, ScheduledSeq
from engine.request import ScoredPart, TokenLogprobs
from engine.sampling.draws import REACH, gumbel, narrow
from engine.sampling.rows import BeamRows, Draws, SamplingBatch, edit

#: The most logits of a prompt computed at one time: 32 MiB in fp32, whatever the prompt's length.
_SLICE = 1 << 23
#: The alignment of rows on a GPU, in fp32 numbers.
_ALIGNED = 8


def token_logprobs(log_probs: Tensor, tokens: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row, the log probabilities of the chosen token and of the `counts[row]` most likely tokens.

    `log_probs`: log probabilities [rows, vocabulary]. `tokens`: int64 [rows]; `ids`: the same on the host.
    """
    values, likeliest = ranked(log_probs, tokens, max(counts))
    return listed(values.tolist(), likeliest.tolist(), ids, counts)


def log_softmax(logits: Tensor) -> Tensor:
    """The log softmax of `logits`, [rows, vocabulary], in fp32. On a GPU the order of summation depends on a row's
    alignment to 16 bytes, so every row is aligned here."""
    wide, missing = logits.float(), -logits.shape[-1] % _ALIGNED
    if logits.device.type == "cpu" or not missing:
        return wide.log_softmax(-1)
    return F.pad(wide, (0, missing), value=float("-inf")).log_softmax(-1)[:, : logits.shape[-1]]


def ranked(log_probs: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns two tensors. fp32 [rows, 1 + count]: the token's log probability, then those of the most likely tokens.
    int64 [rows, count]: the ids of the most likely tokens. It does not wait for the device."""
    # Always the same count: it decides which of equal tokens come first, and other rows may want more.
    values, likeliest = log_probs.topk(min(MAX_LOGPROBS, log_probs.shape[-1]))
    values, likeliest = values[:, :count], likeliest[:, :count]
    return torch.cat((log_probs.gather(1, tokens[:, None]), values), 1), likeliest


def listed(
    values: list[list[float]], likeliest: list[list[int]], ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Turn the results of `ranked` for tokens `ids` into TokenLogprobs."""
    return [
        TokenLogprobs(token, row_values[0], tuple(zip(top[:count], row_values[1 : count + 1], strict=True)))
        for token, row_values, top, count in zip(ids, values, likeliest, counts, strict=True)
    ]


def score_prompts(
    rows: list[tuple[ScheduledSeq, range]], hidden: Tensor, logits: Callable[[Tensor, int], Tensor], vocab: int
) -> None:
    """Set `scored` of each row.

    `rows`: the rows with their wanted positions, at least one each. `hidden`: [wanted positions, hidden size], their
    hidden states in order. `logits`: a function from any slice of these, and the index of its first row, to logits.
    Only a prompt whose logits are not all finite gets an error.
    """
    ids: list[int] = []
    counts: list[int] = []
    for row, span in rows:
        ids += row.seq.tokens[span.start + 1 : span.stop + 1]
        counts += [row.seq.scores.top if row.seq.scores else 0] * len(span)
    tokens = upload([np.array(ids, np.int64)], hidden.device)[0]
    logprobs: list[TokenLogprobs] = []
    finite: list[bool] = []
    size = max(1, _SLICE // vocab)
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        part = logits(hidden[start:end], start).float()
        finite += (part.amin(-1).isfinite() & part.amax(-1).isfinite()).tolist()
        logprobs += token_logprobs(log_softmax(part), tokens[start:end], ids[start:end], counts[start:end])
    start = 0
    for row, span in rows:
        end = start + len(span)
        whole = all(finite[start:end])
        row.scored = ScoredPart(span.start + 1, logprobs[start:end] if whole else [], None if whole else NOT_FINITE)
        start = end


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
    before = None if batch.beams is None else begin_beams(logits, batch.beams)
    if batch.edits is not None:
        edit(logits, batch.edits)
        if batch.edits.forbids:
            faults += 2 * (logits.amax(-1) == float("-inf")).long()
    tokens = logits.argmax(-1)
    if batch.draws is not None:
        tokens[batch.draws.rows] = draw(logits[batch.draws.rows], batch.draws, candidates)
    ids, fault_codes = torch.stack((tokens, faults)).tolist()
    logprobs = {} if log_probs is None else _logprobs(log_probs, tokens, ids, batch)
    sampled = [
        failed(token, fault) if fault else Sampled(token, logprobs.get(row))
        for row, (token, fault) in enumerate(zip(ids, fault_codes, strict=True))
    ]
    if batch.beams is not None and before is not None:
        results = [tensor.tolist() for tensor in ranked_continuations(logits[batch.beams.rows], before, batch.beams)]
        continue_beams(sampled, fault_codes, results, batch.beams)
    return sampled


def begin_beams(logits: Tensor, beams: BeamRows) -> Tensor:
    """Replace the beams' rows of `logits`, fp32 [rows, vocabulary], by the log probabilities of which their scores are
    sums: these are what penalties, biases and lists change. Returns them as they are before, [beams, vocabulary]."""
    before = log_softmax(logits[beams.rows])
    logits[beams.rows] = before
    return before


def ranked_continuations(scores: Tensor, before: Tensor, beams: BeamRows) -> list[Tensor]:
    """The likeliest next tokens of each beam: their scores, fp32 [beams, count], and ids, int64. If log probabilities
    are wanted, also those of the same tokens in the model's own distribution, and the values and ids of `ranked`'s
    likeliest.

    `scores`: log probabilities after all edits, fp32 [beams, vocabulary]; `before`: before them. Does not wait for the
    device.
    """
    values, ids = scores.topk(max(beams.counts))
    if max(beams.listed) < 0:
        return [values, ids]
    return [values, ids, before.gather(1, ids), *before.topk(min(MAX_LOGPROBS, before.shape[-1]))]


def continue_beams(sampled: list[Sampled], faults: list[int], results: list[list[list[Any]]], beams: BeamRows) -> None:
    """Put the results of `ranked_continuations`, on the host, in the place of the beams' tokens. A beam that no token
    may continue has none, and fails nothing."""
    for at, (row, count, top) in enumerate(zip(beams.on_host, beams.counts, beams.listed, strict=True)):
        if faults[row] & 1:
            continue
        values, ids = results[0][at], results[1][at]
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if top >= 0:
            likeliest = tuple(zip(results[4][at][:top], results[3][at][:top], strict=True))
            logprobs = [TokenLogprobs(*pair, likeliest) for pair in zip(ids, results[2][at], strict=True)]
        entries = [*map(Continuation, ids, values, logprobs)][:count]
        kept = tuple(entry for entry in entries if entry.score > float("-inf"))
        sampled[row] = Sampled(ids[0], continuations=kept)


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
