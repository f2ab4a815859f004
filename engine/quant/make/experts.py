"""Chooses the calibration rows of each expert of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels, PreparedLinear
from engine.layers import Experts


def run_each_when_called(experts: Experts, kernels: Kernels) -> None:
    """When `experts` is called, first run each expert by itself, on `rows_of` it. So each of its products is called
    once, and what they are replaced by then runs on the routed rows."""

    def make(run: PreparedLinear) -> PreparedLinear:
        def first(x: Tensor) -> Tensor:
            logits = run(x)
            chosen, _ = kernels.route(logits, experts.shape.chosen, experts.shape.normed)
            least = max(experts.shape.width, x.shape[1])
            for i, expert in enumerate(experts.experts):
                expert(x[rows_of(i, logits, chosen, least)])
            experts.router.replace(lambda _: run)
            experts.prepare()
            return logits

        return first

    experts.router.replace(make)


def rows_of(expert: int, logits: Tensor, chosen: Tensor, least: int) -> Tensor:
    """The indexes of an expert's calibration rows: those that are routed to it. If they are fewer than `least`, the
    rows for which it is likeliest are added: from fewer rows than a matrix has inputs, GPTQ learns too little.

    `logits`: the router's, [rows, experts]. `chosen`: int64 [rows, chosen].
    """
    routed = (chosen == expert).any(1)
    likely = logits.float().softmax(-1)[:, expert]
    order = torch.where(routed, likely + 1, likely).argsort(descending=True, stable=True)
    return order[: max(int(routed.sum()), least)].sort().values
