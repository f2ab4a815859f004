"""The optimizer Muon, for hidden matrices: it makes momentum orthogonal before applying it.

Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). `torch.optim.Muon` is
not used because it iterates in bf16. On a CPU without bf16 instructions, that costs more than the forward and backward
pass together. In fp32 and batched over equal shapes, it costs a tenth.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon:
    """Updates matrices only. Equal shapes are updated as one batch. The caller clears gradients."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum = momentum
        self.decay = decay
        groups: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self._groups = list(groups.values())
        #: The momentum, one `[n, rows, columns]` tensor for each shape. With the weights, it is the whole state of a
        #: run.
        self.velocity = [torch.zeros(len(group), *group[0].shape) for group in self._groups]

    def load(self, velocity: Iterable[Tensor]) -> None:
        """Load the momentum of an earlier run over the same matrices."""
        for ours, theirs in zip(self.velocity, velocity, strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update of learning rate `rate` (spectral norm of a square matrix's update)."""
        for group, velocity in zip(self._groups, self.velocity, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(velocity, self.momentum))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            for matrix, delta in zip(group, update, strict=True):
                matrix.mul_(1 - rate * self.decay).sub_(delta, alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a batch `[n, rows, columns]`, by Newton-Schulz iteration.

    The resulting singular values are between about 0.7 and 1.2, which is close enough for a direction.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
