"""Rounds a matrix to 4 or 8 bits, symmetrically, with one scale for each output or each group of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.quant.formats import Matrix

#: The factors of the scale that holds the largest number, to try as scales. Clipping a few large numbers can be better
#: than rounding all others more coarsely.
_SHRINKS = tuple(1 - step / 50 for step in range(21))
#: The part of the mean of the Hessian's diagonal that is added to it, so that it can be inverted (arXiv 2210.17323).
_DAMPING = 0.01
#: The number of columns that take the errors of all columns before them together.
_BLOCK = 64
#: The rows of one product of inputs, and the outputs that it is packed for: both fit a processor's cache.
_ROWS, _OUTPUTS = 2048, 384


@dataclass(frozen=True, slots=True)
class Grid:
    bits: int
    group: int | None
    """The number of inputs that share a scale; None: all."""
    dtype: torch.dtype
    """The data type of scales."""


def input_hessian(x: Tensor, kernels: Kernels) -> Tensor:
    """The sum of x x^T over the rows of `x`, [rows, inputs], in fp32.

    `kernels` compute in fp32, but may round the factors of a product. They make the lower half, which is the upper one
    turned over.
    """
    inputs = x.shape[1]
    total = torch.zeros(inputs, inputs, device=x.device)
    for rows in torch.split(x.to(kernels.compute_dtype), _ROWS):
        across = rows.T.contiguous()
        for start in range(0, inputs, _OUTPUTS):
            part = across[start : start + _OUTPUTS]
            product = kernels.prepare_adapter(part.to(kernels.weight_dtype))  # which is freed at once
            total[start:, start : start + _OUTPUTS] += product(across[start:])
    return total.tril() + total.tril(-1).T


def nearest(weight: Tensor, grid: Grid) -> Matrix:
    """Round each number of `weight`, [outputs, inputs], by itself."""
    return _rounded(weight.float(), _scales(weight.float(), torch.ones(weight.shape[1]).to(weight.device), grid), grid)


def compensated(weight: Tensor, hessian: Tensor, grid: Grid) -> Matrix:
    """Round `weight` so that its product with the inputs of `hessian` changes least: GPTQ (arXiv 2210.17323).

    `hessian`: [inputs, inputs], the sum of x x^T over these inputs. Columns are rounded one after another, the most
    important first, and each compensates for the errors of those before it. Scales are chosen before, for the groups
    of adjacent inputs, so that readers need not know the order of rounding.
    """
    weight, hessian = weight.float(), hessian.float()
    importance = hessian.diagonal()
    scales = _scales(weight, importance.clamp(min=importance.mean() * 1e-3 + 1e-12), grid)
    order = importance.argsort(descending=True, stable=True)
    columns = scales.T.float().repeat_interleave(weight.shape[1] // scales.shape[1], 0)[order]
    q = _in_order(weight.T[order], _feedback(hessian[order][:, order]), columns, 2 ** (grid.bits - 1))
    straight = torch.empty_like(q).index_copy_(0, order, q).T.contiguous()
    return Matrix(grid.bits, straight, scales.T.contiguous(), None, None)


def _in_order(columns: Tensor, feedback: Tensor, scales: Tensor, middle: int) -> Tensor:
    """Round the columns of a weight in order. All are [inputs, outputs], a column to a row, but `feedback`."""
    errors, q = torch.empty_like(columns), torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    for start in range(0, len(columns), _BLOCK):
        block = slice(start, start + _BLOCK)
        aims = columns[block] + feedback[:start, block].T @ errors[:start]
        for k, aim in enumerate(aims, start):
            aim += feedback[start:k, k] @ errors[start:k]
            rounded = (aim / scales[k]).round_().clamp_(-middle, middle - 1)
            torch.sub(columns[k], rounded * scales[k], out=errors[k])
            q[k] = rounded.add_(middle)
    return q


def _scales(weight: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """The scales, [outputs, groups] in the grid's dtype, with the least sum of squared errors, weighted by the inputs'
    importance."""
    outputs, inputs = weight.shape
    group = inputs if grid.group is None else grid.group
    grouped = weight.view(outputs, -1, group)
    weights = importance.view(1, -1, group)
    middle = 2 ** (grid.bits - 1)
    # The tighter of the two limits, -middle and middle - 1.
    low, high = grouped.amin(-1), grouped.amax(-1)
    widest = torch.maximum(-low / middle, high / (middle - 1))
    best = torch.full_like(widest, math.inf)
    scales = torch.ones_like(widest)
    for shrink in _SHRINKS:
        scale = (widest * shrink).to(grid.dtype).float()
        scale = torch.where(scale > 0, scale, 1.0)
        rounded = (grouped / scale[..., None]).round_().clamp_(-middle, middle - 1).mul_(scale[..., None])
        error = (rounded.sub_(grouped).square_() * weights).sum(-1)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
    return scales.to(grid.dtype)


def _rounded(weight: Tensor, scales: Tensor, grid: Grid) -> Matrix:
    middle = 2 ** (grid.bits - 1)
    grouped = weight.view(len(weight), scales.shape[1], -1) / scales.float()[..., None]
    q = grouped.round().clamp(-middle, middle - 1).flatten(1) + middle
    return Matrix(grid.bits, q.to(torch.uint8), scales.T.contiguous(), None, None)


def _feedback(hessian: Tensor) -> Tensor:
    """The upper triangular U, with ones on its diagonal, of hessian = U D U^T.

    Column k says how much of the errors of the columns before it column k is to compensate. That is GPTQ's own rule
    without an inverse (arXiv 2307.13304, theorem 6). The matrix is damped until it can be factored, because inputs
    that are always equal, or 0, make it singular.
    """
    damping = _DAMPING * float(hessian.diagonal().mean()) or 1.0
    while True:
        damped = hessian.flip(0, 1).double()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper: Tensor = lower.flip(0, 1)
            return upper.div_(upper.diagonal().clone()).float()
        damping *= 10
