"""Rotary position embedding (arXiv 2104.09864): computes the angles of a step's positions.

Frequencies may be scaled for contexts longer than a model was first trained on. Each kind of RopeScaling gives the same
frequencies as transformers' function of that `rope_type`. Two kinds depend on the sequence's length. transformers uses
the length that a forward pass has reached. Here the keys of earlier tokens are in a KV cache, perhaps shared, and
neither prefill chunks nor other sequences may change them. So such a kind has two sets of frequencies and a `switch`.
All tokens of a sequence of up to `switch` tokens use the first set, all tokens of a longer one the second. A sequence
that grows past the switch is computed anew from its first token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Kernels


class Rope:
    """Computes angles at each step. A table of angles would take 134 MB for 128k positions and save no time."""

    def __init__(
        self, kernels: Kernels, rotary_dim: int, theta: float, scaling: RopeScaling, *, device: torch.device
    ) -> None:
        """`rotary_dim`: the number of a head's dimensions, from the first on, that are rotated."""
        self._dtype = kernels.compute_dtype
        self._factor = scaling.attention_factor
        # Always made on the CPU, so that the frequencies do not depend on the device.
        self._frequencies = scaling.frequencies(theta, rotary_dim).to(device)
        self._long = None if scaling.switch is None else scaling.frequencies(theta, rotary_dim, long=True).to(device)

    def __call__(self, positions: Tensor, long: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin, [tokens, 1, rotary_dim], of `positions`, int64 [tokens], as `Kernels.rope` expects them.

        `long`: bool [tokens], whether the token's sequence is beyond the scaling's switch. None if there is no switch.
        """
        frequencies = self._frequencies
        if self._long is not None and long is not None:
            frequencies = torch.where(long[:, None, None], self._long, frequencies)
        angles = positions.float()[:, None, None] * frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """No scaling, and the base of all others."""

    attention_factor: float = 1.0
    """The factor of cosines and sines."""

    @property
    def switch(self) -> int | None:
        """The tokens of the longest sequence that uses the first set. None if there is only one set."""
        return None

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        """The frequencies, fp32 [dim / 2], of the second set if `long`."""
        return plain(theta, dim)


@dataclass(frozen=True, slots=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv 2306.15595)."""

    factor: float

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        return plain(theta, dim) / self.factor


@dataclass(frozen=True, slots=True)
class DividedScaling(RopeScaling):
    """Frequencies with a divisor each, as GGUF files have them (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]
    """dim / 2 divisors."""

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        return plain(theta, dim) / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class DynamicScaling(RopeScaling):
    """Dynamic NTK: a larger base for sequences longer than the model's own context.

    Up to `context` tokens the frequencies equal those of transformers to the bit. Beyond, transformers has a base for
    every length and does not change earlier keys, so its output depends on where the prompt ended. Here the base is
    always the one for `factor * context` tokens, the longest sequences that are served.
    """

    factor: float
    context: int

    @property
    def switch(self) -> int:
        return self.context

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        return self.at_length(theta, dim, int(self.factor * self.context) if long else self.context)

    def at_length(self, theta: float, dim: int, length: int) -> Tensor:
        """The frequencies for sequences of `length` tokens, at least `context`."""
        stretch = self.factor * length / self.context - (self.factor - 1)
        return plain(theta * stretch ** (dim / (dim - 2)), dim)


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling of low frequencies (its model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        """Short wavelengths are kept, long ones are divided by `factor`, those in between are blended."""
        frequencies = plain(theta, dim)
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        blend = (context / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): fast-rotating dimensions are kept, slowly rotating ones are interpolated."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the borders of the ramp are rounded to whole dimensions."""

    @staticmethod
    def mscale(factor: float, mscale: float = 1.0) -> float:
        """The paper's attention factor (its equation 22)."""
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        def turns_at(rotations: float) -> float:
            """The dimension that makes `rotations` rotations over the original context."""
            return (
                dim
                * math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low, high = turns_at(self.beta_fast), turns_at(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        kept = 1 - interpolated
        periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


@dataclass(frozen=True, slots=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv 2402.13753): a divisor for each dimension, one list for short sequences and one for long.

    It works as in transformers' Phi-3, which computes its KV cache anew when a generation passes the switch. A prompt
    longer than the switch uses the long list from its first token.
    """

    short_factor: tuple[float, ...]
    """dim / 2 divisors, like long_factor."""
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int

    @staticmethod
    def factor_of(factor: float, original: int) -> float:
        """The paper's attention factor for a context `factor` times as long as the original one."""
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    @property
    def switch(self) -> int:
        return self.original_max_position_embeddings

    def frequencies(self, theta: float, dim: int, *, long: bool = False) -> Tensor:
        divisors = torch.tensor(self.long_factor if long else self.short_factor, dtype=torch.float32)
        return 1.0 / (divisors * theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
