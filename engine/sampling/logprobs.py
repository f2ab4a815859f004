"""Log probabilities as callers get them: of chosen tokens, and of a prompt's own."""

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

#: Logits of a prompt that are computed at a time, in numbers: 32 MiB in fp32, whatever the prompt's length.
_SLICE = 1 << 23
#: Numbers in fp32 between places that a GPU likes to read from.
_ALIGNED = 8


def token_logprobs(said: Tensor, tokens: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row the token's log probability and those of the likeliest `counts[row]` tokens.

    `said` [rows, vocabulary] log probabilities; `tokens` int64 [rows], `ids` the same on the host.
    """
    values, likeliest = ranked(said, tokens, max(counts))
    return listed(values.tolist(), likeliest.tolist(), ids, counts)


def log_softmax(logits: Tensor) -> Tensor:
    """Of `logits` [rows, vocabulary], in fp32. On a GPU a row is summed in another order where it begins at another
    distance from a multiple of 16 bytes: each is made to begin at one."""
    wide, missing = logits.float(), -logits.shape[-1] % _ALIGNED
    if logits.device.type == "cpu" or not missing:
        return wide.log_softmax(-1)
    return F.pad(wide, (0, missing), value=float("-inf")).log_softmax(-1)[:, : logits.shape[-1]]


def ranked(said: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(fp32 [rows, 1 + most]: the token's log probability, then those of the likeliest; int64 [rows, most]: their ids).
    Of the device nothing is waited for."""
    # Always as many: which of equal ones come first goes with how many are asked for, and neighbours may want more.
    values, likeliest = said.topk(min(MAX_LOGPROBS, said.shape[-1]))
    values, likeliest = values[:, :most], likeliest[:, :most]
    return torch.cat((said.gather(1, tokens[:, None]), values), 1), likeliest


def listed(
    values: list[list[float]], likeliest: list[list[int]], ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """`ranked` as callers get it, of tokens `ids`."""
    return [
        TokenLogprobs(token, own[0], tuple(zip(top[:count], own[1 : count + 1], strict=True)))
        for token, own, top, count in zip(ids, values, likeliest, counts, strict=True)
    ]


def score_prompts(
    rows: list[tuple[ScheduledSeq, range]], hidden: Tensor, logits: Callable[[Tensor], Tensor], vocab: int
) -> None:
    """Set `scored` of each row; its range is that of the wanted positions, of which there are some. `hidden` [wanted
    positions, hidden size] are theirs in order, `logits` makes logits of any slice of them. A prompt whose logits are
    not all finite gets an error, alone.
    """
    ids: list[int] = []
    counts: list[int] = []
    for row, span in rows:
        ids += row.seq.tokens[span.start + 1 : span.stop + 1]
        counts += [row.seq.scores.top if row.seq.scores else 0] * len(span)
    tokens = upload([np.array(ids, np.int64)], hidden.device)[0]
    found: list[TokenLogprobs] = []
    finite: list[bool] = []
    size = max(1, _SLICE // vocab)
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        part = logits(hidden[start:end]).float()
        finite += (part.amin(-1).isfinite() & part.amax(-1).isfinite()).tolist()
        found += token_logprobs(log_softmax(part), tokens[start:end], ids[start:end], counts[start:end])
    place = 0
    for row, span in rows:
        end = place + len(span)
        whole = all(finite[place:end])
        row.scored = ScoredPart(span.start + 1, found[place:end] if whole else [], None if whole else NOT_FINITE)
        place = end
