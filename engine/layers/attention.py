"""Self-attention over the paged KV cache: a packed q, k, v product, rotation, cache write, attention, output.

`RmsNorm` is root mean square normalisation, alone or with the residual sum before it.

`Rope` is rotary position embedding (arXiv 2104.09864): it computes the angles of a step's positions.

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

from engine.kernels import Kernels, RaggedBatch
from engine.kernels.unmasked import TextBatch
from engine.layers.adapted import AdaptedRows
from engine.layers.linear import Linear


class RmsNorm:
    def __init__(self, kernels: Kernels, width: int, eps: float, *, offset: float, device: torch.device) -> None:
        """`offset`: added to the checkpoint's weight. If it is not 0, weight and product are fp32, because such weights
        are small numbers around 0, whose digits a sum near 1 would lose in half precision."""
        self._kernels = kernels
        self._eps = eps
        self._offset = offset
        dtype = torch.float32 if offset else kernels.compute_dtype
        self.weight = torch.empty(width, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight}

    def pack(self) -> None:
        self.weight += self._offset

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum). May overwrite `residual`."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self._eps)


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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    width: int
    """The width of input and output rows."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """The factor of attention scores."""
    softcap: float | None = None
    """The bound of attention scores: cap * tanh(score / cap) (arXiv 2408.00118). None for no bound."""
    qkv_bias: bool = False
    output_bias: bool = False
    fused: bool = False
    """Whether the checkpoint has one matrix for q, k and v."""


class Attention:
    def __init__(self, kernels: Kernels, shape: AttentionShape, *, device: torch.device) -> None:
        self._kernels = kernels
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {"qkv_proj": q + 2 * kv} if shape.fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = Linear(kernels, shape.width, parts, bias=shape.qkv_bias, device=device)
        self.output = Linear(kernels, q, {"o_proj": shape.width}, bias=shape.output_bias, device=device)

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        return [(prefix, self.qkv), (prefix, self.output)]

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return self.qkv.weights(prefix) | self.output.weights(prefix)

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()
        shape = self.shape
        self._kernels.prepare_attention(shape.heads, shape.kv_heads, shape.head_dim, shape.softcap)

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: RaggedBatch,
        adapters: AdaptedRows | None = None,
    ) -> Tensor:
        """`x`: [tokens, width]. `rotation`: from Rope. `cache`: this layer's, [2, blocks, block, kv_heads,
        head_dim]."""
        heads = self._prepared(self.qkv(x, adapters).view(len(x), -1, self.shape.head_dim))
        return self.output(self._attend(heads, rotation, cache, batch), adapters)

    def _attend(self, heads: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor, batch: RaggedBatch) -> Tensor:
        """`heads`: from `_prepared`. Writes keys and values to `cache`. Returns [tokens, heads * head_dim]."""
        query = self._kernels.rope_and_write(heads, *rotation, cache, batch)
        out = self._kernels.paged_attention(query, cache, batch, self.shape.scale, self.shape.softcap)
        return out.reshape(len(heads), -1)

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """The norm weights of queries and keys, applied before the rotation. None if there are none."""
        return None

    def _prepared(self, heads: Tensor) -> Tensor:
        """Queries, keys and values, [tokens, heads + 2 * kv_heads, head_dim], ready for the rotation."""
        return heads


class NormedAttention(Attention):
    """Attention that norms each head's query and key before the rotation, with one weight for queries and one for
    keys."""

    def __init__(
        self, kernels: Kernels, shape: AttentionShape, *, eps: float, offset: float, device: torch.device
    ) -> None:
        super().__init__(kernels, shape, device=device)
        self._eps = eps
        self._query_norm = RmsNorm(kernels, shape.head_dim, eps, offset=offset, device=device)
        self._key_norm = RmsNorm(kernels, shape.head_dim, eps, offset=offset, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return (
            super().weights(prefix)
            | self._query_norm.weights(f"{prefix}q_norm.")
            | self._key_norm.weights(f"{prefix}k_norm.")
        )

    def pack(self) -> None:
        super().pack()
        self._query_norm.pack()
        self._key_norm.pack()

    @property
    def head_norms(self) -> tuple[Tensor, Tensor]:
        return self._query_norm.weight, self._key_norm.weight

    def _prepared(self, heads: Tensor) -> Tensor:
        return self._kernels.norm_heads(heads, *self.head_norms, self.shape.kv_heads, self._eps)


class UnmaskedAttention(NormedAttention):
    """The same where a token sees those on both sides of it. Nothing is read from the cache, nor written to it."""

    def _attend(self, heads: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor, batch: RaggedBatch) -> Tensor:
        """`batch`: of whole sequences. Its window, less one, is how far a token sees in each direction."""
        shape, kernels = self.shape, self._kernels
        rotated = kernels.rope(heads[:, : -shape.kv_heads].contiguous(), *rotation)
        query, key = rotated[:, : shape.heads], rotated[:, shape.heads :]
        query = query * (shape.scale * shape.head_dim**0.5)  # scores are divided by that root
        shared = shape.heads // shape.kv_heads
        key, value = (part.repeat_interleave(shared, 1) for part in (key, heads[:, -shape.kv_heads :]))
        texts = TextBatch(batch.kv_lens.tolist(), batch.query_starts)
        reach = None if batch.window is None else batch.window - 1
        return kernels.attend_unmasked(torch.stack((query, key, value), 1), texts, reach)
