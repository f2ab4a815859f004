"""Adds up what GPTQ knows of a product's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import Kernels

#: The rows of one product, and the outputs that it is packed for: both inputs stay in a processor's cache.
_ROWS, _OUTPUTS = 2048, 384


def hessian(x: Tensor, kernels: Kernels) -> Tensor:
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
            product = kernels.prepare_linear(part.to(kernels.weight_dtype), None)
            total[start:, start : start + _OUTPUTS] += product(across[start:])
    return total.tril() + total.tril(-1).T
