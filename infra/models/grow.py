"""A trained network made wider without changing what it computes.

Source: Chen, Goodfellow, Shlens, "Net2Net: accelerating learning via knowledge transfer" (2015). Here new units of the
feed-forward layers read at random and write nothing, rather than copy old ones: they need no breaking of symmetry.
"""

from dataclasses import replace

import torch

from infra.models.llama import Llama, Shape


@torch.no_grad()
def widened(model: Llama, shape: Shape) -> Llama:
    """A network of the `shape`, which may differ in a larger `intermediate_size` alone. Raises ValueError."""
    old = model.shape
    if (
        replace(shape, intermediate_size=old.intermediate_size) != old
        or shape.intermediate_size < old.intermediate_size
    ):
        raise ValueError(f"cannot grow {old} to {shape}: only intermediate_size may change, and only upwards")
    grown = Llama(shape)
    state = grown.state_dict()
    for name, value in model.state_dict().items():
        target = state[name]
        if name.endswith("down_proj.weight"):
            target.zero_()
        target[tuple(slice(size) for size in value.shape)] = value
    return grown
