"""An encoder: every token of a sequence sees the tokens on both sides. It has no KV cache and makes no tokens.

BERT and its descendants are the same layers with other positions (a table, a rotation, a bias of distances), the norms
before or after their blocks, and a plain or a gated feed-forward block. A family is a table of these (encoders.py).

A batch is ragged: the tokens of all sequences one after another, without padding. Products, norms and activations run
on all rows, attention on each sequence. With kernels whose rows depend on nothing but themselves (the native ones, and
the deterministic ones), a sequence's result does not depend on what is beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.kernels import Kernels
from engine.kernels.unmasked import ACTIVATIONS, SPARE_DISTANCES, TextBatch
from engine.layers import Embedding, Linear, Rope
from engine.models.loader import Fill
from engine.models.settings import RopeSettings
from engine.text.config import Config

#: The distance from which MPNet's bias is the same for all distances.
_FARTHEST: Final = 128


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The settings of an encoder. The names are transformers', shortened."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    vocab_size: int
    context_length: int
    """The most tokens of one sequence."""
    norm_eps: float
    activation: str
    """A key of ACTIVATIONS."""
    token_types: int = 0
    """The rows of the table of token types. 0: there is none."""
    positions: int = 0
    """The rows of the table of positions. 0: there is none."""
    first_position: int = 0
    """The row of a sequence's first token."""
    distance_buckets: int = 0
    """The rows of the table of biases of attention scores, by distance, that all layers share. 0: there is none."""
    ropes: tuple[RopeSettings, ...] = ()
    rope_of: tuple[int, ...] = ()
    """For each layer, the index of its entry in `ropes`; () without ropes."""
    reaches: tuple[int | None, ...] = ()
    """For each layer, the distance of the farthest tokens that a token sees. None for all; () for all in all layers."""
    pre_norm: bool = False
    """Whether a block's input is normed (ModernBERT), not the sum after the block (BERT)."""
    gated: bool = False
    """Whether the feed-forward block is gated."""
    qkv_bias: bool = True
    output_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The head of a classifier: pooled rows, or the rows of all tokens; a dense layer with an activation and perhaps a
    norm; then the labels."""

    labels: int
    activation: str | None
    """A key of ACTIVATIONS. None: there is no dense layer."""
    tokens: bool = False
    """Whether each token has labels. Else a sequence has."""
    mean: bool = False
    """Whether rows are the means of their sequences. Else they are the first tokens'."""
    dense_bias: bool = True
    norm: bool = False


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders: how config.json is read, and the engine's names of a checkpoint's tensors."""

    read: Callable[[Config], EncoderSettings]
    """Reads the settings. Raises ModelError naming a setting that it cannot serve."""
    rename: Callable[[str], str | None]
    """The engine's name of a checkpoint's tensor. None for a tensor to skip."""
    head: Callable[[Config], HeadSettings] | None = None
    """Reads the settings of the classifier. None: the architecture has none."""


class _Norm:
    """Layer normalisation (arXiv 1607.06450)."""

    def __init__(self, kernels: Kernels, c: EncoderSettings, device: torch.device) -> None:
        self._kernels, self._eps = kernels, c.norm_eps
        self._weight = torch.empty(c.hidden_size, dtype=kernels.compute_dtype, device=device)
        self._bias = torch.empty_like(self._weight) if c.norm_bias else None

    def weights(self, prefix: str) -> dict[str, Tensor]:
        bias = {} if self._bias is None else {f"{prefix}.bias": self._bias}
        return {f"{prefix}.weight": self._weight} | bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See Reference.add_layer_norm."""
        return self._kernels.add_layer_norm(x, residual, self._weight, self._bias, self._eps)


class _Layer:
    """Attention and a feed-forward block, each with its sum and its norm."""

    def __init__(self, c: EncoderSettings, i: int, kernels: Kernels, device: torch.device) -> None:
        width, inner = c.hidden_size, c.intermediate_size
        qkv = dict.fromkeys(("q", "k", "v"), width)
        up = {"gate": inner, "up": inner} if c.gated else {"up": inner}
        self.qkv = Linear(kernels, width, qkv, bias=c.qkv_bias, device=device)
        self.output = Linear(kernels, width, {"output": width}, bias=c.output_bias, device=device)
        self.up = Linear(kernels, width, up, bias=c.up_bias, device=device)
        self.down = Linear(kernels, inner, {"down": width}, bias=c.down_bias, device=device)
        # The first layer's input is normed by the embedding.
        self.attention_norm = None if c.pre_norm and i == 0 else _Norm(kernels, c, device)
        self.mlp_norm = _Norm(kernels, c, device)
        self.heads, self.head_dim = c.heads, c.head_dim
        self.reach = c.reaches[i] if c.reaches else None
        self.rope = c.rope_of[i] if c.rope_of else None
        self._pre_norm = c.pre_norm
        self._activate = kernels.gate(c.activation) if c.gated else kernels.activation(c.activation)

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        return [(prefix, linear) for linear in (self.qkv, self.output, self.up, self.down)]

    def weights(self, prefix: str) -> dict[str, Tensor]:
        places = self.mlp_norm.weights(f"{prefix}mlp_norm")
        if self.attention_norm is not None:
            places |= self.attention_norm.weights(f"{prefix}attention_norm")
        for _, linear in self.linears(prefix):
            places |= linear.weights(prefix)
        return places

    def pack(self) -> None:
        for _, linear in self.linears(""):
            linear.pack()

    def __call__(self, x: Tensor, attend: Callable[[Tensor, _Layer], Tensor]) -> Tensor:
        """`attend`: attention of rows [tokens, 3, heads, head_dim] -> [tokens, hidden_size]."""
        norm = self.attention_norm
        if self._pre_norm:
            inside, x = self.mlp_norm.add(self._attention(x if norm is None else norm(x), attend), x)
            return x + self._feed(inside)
        assert norm is not None
        x, _ = norm.add(self._attention(x, attend), x)
        return self.mlp_norm.add(self._feed(x), x)[0]

    def _attention(self, x: Tensor, attend: Callable[[Tensor, _Layer], Tensor]) -> Tensor:
        return self.output(attend(self.qkv(x).view(len(x), 3, self.heads, self.head_dim), self))

    def _feed(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x)))


class Encoder:
    """A loaded encoder. An instance belongs to one thread, as its kernels do."""

    def __init__(
        self, family: EncoderFamily, config: Config, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.settings = c = family.read(config)
        self.head = None if family.head is None else family.head(config)
        self._rename = family.rename
        self.kernels, self.device, self.dtype = kernels, device, dtype
        self.vocab_size, self.context_length, self.width = c.vocab_size, c.context_length, c.hidden_size

        def table(rows: int) -> Embedding:
            return Embedding(kernels, rows, c.hidden_size, tied=False, dtype=dtype, device=device)

        self._words = table(c.vocab_size)
        self._types = table(c.token_types) if c.token_types else None
        self._positions = table(c.positions) if c.positions else None
        self._norm = _Norm(kernels, c, device)
        self._last_norm = _Norm(kernels, c, device) if c.pre_norm else None
        self._layers = [_Layer(c, i, kernels, device) for i in range(c.layers)]
        self._ropes = [Rope(kernels, rope.rotary_dim, rope.theta, rope.scaling, device=device) for rope in c.ropes]
        self._biases = (
            torch.empty(c.distance_buckets, c.heads, dtype=kernels.compute_dtype, device=device)
            if c.distance_buckets
            else None
        )
        self._dense = self._head_norm = self._labels = None
        if self.head is not None:
            if self.head.activation is not None:
                parts = {"dense": c.hidden_size}
                self._dense = Linear(kernels, c.hidden_size, parts, bias=self.head.dense_bias, device=device)
            self._labels = Linear(kernels, c.hidden_size, {"labels": self.head.labels}, bias=True, device=device)
            self._head_norm = _Norm(kernels, c, device) if self.head.norm else None

    # ---- its weights

    def _tables(self) -> Iterator[tuple[str, Embedding]]:
        named = {"words": self._words, "token_types": self._types, "positions": self._positions}
        yield from ((f"embeddings.{name}.", table) for name, table in named.items() if table is not None)

    def _top(self) -> dict[str, Tensor]:
        """The weights outside of layers."""
        places = self._norm.weights("embeddings.norm")
        for prefix, table in self._tables():
            places |= table.weights(prefix)
        if self._biases is not None:
            places["distances.weight"] = self._biases
        if self._last_norm is not None:
            places |= self._last_norm.weights("last_norm")
        for linear in filter(None, (self._dense, self._labels)):
            places |= linear.weights("head.")
        if self._head_norm is not None:
            places |= self._head_norm.weights("head.norm")
        return places

    def linears(self) -> list[tuple[str, Linear]]:
        """The matrices that may be quantised, each with the prefix of its tensors' names."""
        return [pair for i, layer in enumerate(self._layers) for pair in layer.linears(f"layers.{i}.")]

    def embedding(self) -> tuple[str, Embedding]:
        return "embeddings.words", self._words

    def weights(self) -> dict[str, Tensor]:
        """The tensors to fill from the checkpoint, by name."""
        places = self._top()
        for i, layer in enumerate(self._layers):
            places |= layer.weights(f"layers.{i}.")
        return places

    def canonical(self, name: str) -> str | None:
        """The name in `weights` of a checkpoint's tensor. None for a tensor to skip."""
        return self._rename(name)

    def pack(self, fill: Fill = lambda places: None) -> None:
        """Prepare the weights for the kernels, once. `fill`: see Model.pack."""
        fill(self._top())
        for _, table in self._tables():
            table.pack()
        for i, layer in enumerate(self._layers):
            fill(layer.weights(f"layers.{i}."))
            layer.pack()
        for linear in filter(None, (self._dense, self._labels)):
            linear.pack()

    # ---- a batch

    def forward(self, tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """The last hidden states [tokens, hidden_size] of a ragged batch.

        `tokens`, `types`: int64 [tokens], token ids and token types of all sequences, one after another. `lengths`: of
        each sequence; sequences of one length stand beside each other, for they are computed in one call.
        """
        c = self.settings
        places = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        x = self._words(tokens)
        if self._positions is not None:
            x = x + self._positions(places + c.first_position)
        if self._types is not None:
            x = x + self._types(types)
        x = self._norm(x)
        rotations = [rope(places, None) for rope in self._ropes]
        batch = TextBatch.of(lengths, self.device, self._biases_of(max(lengths)))

        def attend(rows: Tensor, layer: _Layer) -> Tensor:
            if layer.rope is not None:
                turned = rows[:, :2].flatten(1, 2)
                rows[:, :2] = self.kernels.rope(turned, *rotations[layer.rope]).view_as(rows[:, :2])
            return self.kernels.attend_unmasked(rows, batch, layer.reach)

        for layer in self._layers:
            x = layer(x, attend)
        return x if self._last_norm is None else self._last_norm(x)

    def _biases_of(self, farthest: int) -> Tensor | None:
        """The biases of a TextBatch whose longest sequence has so many tokens."""
        if self._biases is None:
            return None
        distances = torch.arange(-farthest, farthest + SPARE_DISTANCES, device=self.device)
        return self._biases[distance_buckets(distances, len(self._biases))].T.contiguous()

    def classify(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """The logits of the labels, [sequences, labels], of hidden states from `forward`; of a classifier of tokens
        [tokens, labels]."""
        head = self.head
        assert head is not None
        assert self._labels is not None
        rows = hidden if head.tokens else means(hidden, lengths) if head.mean else hidden[firsts(lengths, self.device)]
        if self._dense is not None and head.activation is not None:
            rows = ACTIVATIONS[head.activation](self._dense(rows))
        return self._labels(rows if self._head_norm is None else self._head_norm(rows))


def distance_buckets(distances: Tensor, buckets: int) -> Tensor:
    """The bucket of each distance (of a key after its query), as T5 has them (arXiv 1910.10683): half of the buckets
    for each direction, half of these for the distances one by one, the others wider and wider."""
    half = buckets // 2
    exact = half // 2
    away = distances.abs()
    far = exact + (torch.log(away.float() / exact) / math.log(_FARTHEST / exact) * (half - exact)).long()
    return (distances > 0).long() * half + torch.where(away < exact, away, far.clamp(max=half - 1))


def firsts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The rows of the sequences' first tokens, int64 [sequences]."""
    sizes = torch.tensor(lengths, device=device)
    return sizes.cumsum(0) - sizes


def means(hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """The mean of each sequence's rows, [sequences, width]. Each is summed by itself, so it depends on nothing else."""
    return torch.stack([rows.mean(0) for rows in torch.split(hidden, list(lengths))])
