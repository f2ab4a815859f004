"""Products of 2:4 pruned weights on GPUs that skip the zeros (semi-structured sparsity, from compute capability 8.0).

torch keeps the weight without its zeros, with two bits for each number that is left, and multiplies by cuSPARSELt or
CUTLASS. No such product has been run on a GPU yet. So each is compared with the dense one when it is made, and a device
or a torch that cannot make it, or makes other numbers, multiplies the zeros, too.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import PreparedLinear

logger = logging.getLogger("penstock.engine")

#: The first GPUs with such products.
_CAPABILITY = (8, 0)
#: Rows of the comparison, and the error that it allows, relative to the largest number: some roundings of 16 bits.
_ROWS, _ERROR = 16, 0.02
#: Multiples of which torch takes outputs and inputs, in 16 bits.
_OUTPUTS, _INPUTS = 32, 64


def semi_structured_product(weight: Tensor, bias: Tensor | None) -> PreparedLinear | None:
    """The product of a weight [outputs, inputs], of which two of each four adjacent inputs are zero; None if it must be
    a dense one: on other devices, in fp32, for odd shapes, or for a weight that is not so pruned."""
    outputs, inputs = weight.shape
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < _CAPABILITY:
        return None
    if weight.dtype not in (torch.float16, torch.bfloat16) or outputs % _OUTPUTS or inputs % _INPUTS:
        return None
    if not is_pruned(weight):
        return None
    try:
        sparse = torch.sparse.to_sparse_semi_structured(weight)
        x = torch.randn(_ROWS, inputs, dtype=weight.dtype, device=weight.device)
        expected, actual = F.linear(x, weight).float(), F.linear(x, sparse).float()
        if not agree(actual, expected):
            raise ValueError("it gives other numbers than the dense product")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logger.warning("a 2:4 pruned matrix is multiplied with its zeros: %s", error)
        return None
    return lambda x: F.linear(x, sparse, bias)


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same but for roundings. Nothing agrees with NaN."""
    return bool((actual - expected).abs().max() <= _ERROR * expected.abs().max())


def is_pruned(weight: Tensor) -> bool:
    """Whether at most two of each four adjacent inputs are not zero."""
    return weight.shape[1] % 4 == 0 and bool(((weight != 0).view(len(weight), -1, 4).sum(-1) <= 2).all())
