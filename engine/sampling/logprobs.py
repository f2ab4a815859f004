"""Computes the log probabilities of chosen tokens and of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import NOT_FINITE
from engine.kernels.upload import upload
from engine.logprobs import ScoredPart, TokenLogprobs
from engine.params import MAX_LOGPROBS
from engine.plan import ScheduledSeq

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
