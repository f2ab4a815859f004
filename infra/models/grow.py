"""Widens a trained network without changing its outputs.

Source: Chen, Goodfellow, Shlens, "Net2Net: accelerating learning via knowledge transfer" (2015). Here the new units of
feed-forward layers have random inputs and zero outputs instead of copying old units, so no symmetry must be broken.
"""

from dataclasses import replace

import torch

from infra.models.llama import Llama, Shape


@torch.no_grad()
def widened(model: Llama, shape: Shape) -> Llama:
    """A network of the given `shape`, in which only `intermediate_size` may be larger. Raises ValueError."""
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
