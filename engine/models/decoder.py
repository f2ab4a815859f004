"""The decoder that all families share. Families differ in their settings and, rarely, in the norms of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.kernels import Kernels, LayerParts, PreparedLayers, PreparedLinear, RaggedBatch
from engine.kernels.native.exchange import WHOLE, Share
from engine.kv import KvGroup
from engine.layers import (
    AdaptedRows,
    Attention,
    AttentionShape,
    Embedding,
    Experts,
    GatedMlp,
    Linear,
    NormedAttention,
    RmsNorm,
    Rope,
    StepAdapters,
    UnmaskedAttention,
)
from engine.models.loader import Fill
from engine.models.settings import DecoderSettings
from engine.models.shares import SUMMED_BIASES, Cut, cut_of, share_of
from engine.text.config import Config

#: The names of a layer's norms in checkpoints: "input" is before attention, "middle" before the feed-forward block.
_LAYER_NORMS = {"input": "input_layernorm", "middle": "post_attention_layernorm"}
#: The names in checkpoints of the embedding, and what those of layers and of the last norm begin with.
_TABLE, _LAYERS, _NORM = "model.embed_tokens", "model.layers.", "model.norm."


class DecoderLayer:
    """A layer: norm, attention, sum, norm, feed-forward, sum. The decoder calls the sums and the norms after them."""

    def __init__(
        self, c: DecoderSettings, norm_names: Mapping[str, str], kernels: Kernels, device: torch.device
    ) -> None:
        shape = AttentionShape(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            c.head_dim,
            scale=c.head_dim**-0.5 if c.query_scale is None else c.query_scale,
            softcap=c.attention_softcap,
            qkv_bias=c.qkv_bias,
            output_bias=c.output_bias,
            fused=c.fused,
        )
        normed = UnmaskedAttention if c.bidirectional else NormedAttention
        self._attention = (
            normed(kernels, shape, eps=c.norm_eps, offset=c.norm_offset, device=device)
            if c.qk_norm
            else Attention(kernels, shape, device=device)
        )
        self.mlp = self._feed_forward(c, kernels, device)
        self._sum = kernels.sum_ranks
        self._eps = c.norm_eps
        norms = {
            role: RmsNorm(kernels, c.hidden_size, c.norm_eps, offset=c.norm_offset, device=device)
            for role in norm_names
        }
        self.input_norm, self.middle_norm = norms["input"], norms["middle"]
        self._attended_norm, self._fed_norm = norms.get("attended"), norms.get("fed")
        self._norms = {norm_names[role]: norm for role, norm in norms.items()}

    @staticmethod
    def _feed_forward(c: DecoderSettings, kernels: Kernels, device: torch.device) -> GatedMlp | Experts:
        if c.experts is not None:
            return Experts(kernels, c.hidden_size, c.experts, activation=c.activation, device=device)
        return GatedMlp(
            kernels,
            c.hidden_size,
            c.intermediate_size,
            activation=c.activation,
            bias=c.mlp_bias,
            fused=c.fused,
            device=device,
        )

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        """The layer's Linears, each with the prefix of its tensors' names."""
        return self._attention.linears(f"{prefix}self_attn.") + self.mlp.linears(f"{prefix}mlp.")

    def weights(self, prefix: str) -> dict[str, Tensor]:
        places = self._attention.weights(f"{prefix}self_attn.") | self.mlp.weights(f"{prefix}mlp.")
        for name, norm in self._norms.items():
            places |= norm.weights(f"{prefix}{name}.")
        return places

    def pack(self) -> None:
        self._attention.pack()
        self.mlp.pack()
        for norm in self._norms.values():
            norm.pack()

    def parts(self, group: int, cache_index: int, rope: int) -> LayerParts:
        """The layer's weights and settings, for kernel sets that run it in one call.

        `group`: its KV group; `cache_index`: its index in that group's cache; `rope`: the index of its rope.
        """
        shape, mlp = self._attention.shape, self.mlp
        dense, experts = (None, mlp.parts) if isinstance(mlp, Experts) else (mlp, None)
        return LayerParts(
            group,
            cache_index,
            rope,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.scale,
            shape.softcap,
            self._eps,
            input_norm=self.input_norm.weight,
            qkv=self._attention.qkv.prepared,
            head_norms=self._attention.head_norms,
            output=self._attention.output.prepared,
            attended_norm=None if self._attended_norm is None else self._attended_norm.weight,
            middle_norm=self.middle_norm.weight,
            gate_up=None if dense is None else dense.gate_up.prepared,
            activation=mlp.activation,
            down=None if dense is None else dense.down.prepared,
            fed_norm=None if self._fed_norm is None else self._fed_norm.weight,
            experts=experts,
        )

    def attend(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: RaggedBatch,
        adapters: AdaptedRows | None = None,
    ) -> Tensor:
        attended = self._sum(self._attention(x, rotation, cache, batch, adapters))
        return attended if self._attended_norm is None else self._attended_norm(attended)

    def feed(self, x: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        fed = self._sum(self.mlp(x, adapters))
        return fed if self._fed_norm is None else self._fed_norm(fed)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how its settings are read, and the names that are not the usual ones."""

    read: Callable[[Config], DecoderSettings]
    """Reads the settings. Raises ModelError naming a setting that it cannot serve."""
    norms: Mapping[str, str] = field(default_factory=_LAYER_NORMS.copy)
    """The names of a layer's norms in checkpoints. Some families also norm the output of attention, "attended", and
    that of the feed-forward block, "fed", before it is added."""
    rename: Callable[[str], str | None] = lambda name: name
    """The engine's name of a checkpoint's tensor. None for a tensor to skip."""


class Decoder:
    """A Model (registry.py): the layers, made for a family's settings."""

    def __init__(
        self,
        family: Family,
        config: Config,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        stage: Share = WHOLE,
    ) -> None:
        """Make empty layers for `config`. On the device "meta" they take no memory and only have shapes. If `kernels`
        have an exchange, they are one rank's share (shares.py). `stage`: the part of the layers that this one has; the
        first stage has the embedding, and the last one norm and head.

        Raises ModelError naming a setting that the family cannot serve.
        """
        c = family.read(config)
        self._rename = family.rename
        self.kernels, self.device, self.dtype = kernels, device, dtype
        self.vocab_size, self.context_length = c.vocab_size, c.context_length
        #: The token ids of which this rank has the embeddings and makes the logits.
        self.own_tokens = range(c.vocab_size)
        self._whole = c
        if kernels.share is not None:
            self.own_tokens = kernels.share.of(c.vocab_size)
            c = share_of(c, kernels.share)
        self._own_layers = stage.of(c.layers)
        self.is_first, self.has_head = stage.rank == 0, stage.rank + 1 == stage.ranks
        self.staged = stage.ranks > 1
        self._has_table = self.is_first or (c.tied and self.has_head)
        self._others = {f"{_LAYERS}{i}." for i in range(c.layers) if i not in self._own_layers}
        #: The KV groups of all stages' layers.
        self.all_groups, self.rope_switch = c.kv_groups, c.rope_switch
        self._windows = c.windows
        own_windows = c.windows[self._own_layers.start : self._own_layers.stop]
        self.kv_groups = self.groups_of(stage)
        self._embedding = Embedding(
            kernels,
            c.vocab_size,
            c.hidden_size,
            tied=c.tied and self.has_head,
            scale=c.hidden_size**0.5 if c.scales_embedding else None,
            dtype=dtype,
            device=device if self._has_table else torch.device("meta"),
        )
        self._ropes = [Rope(kernels, rope.rotary_dim, rope.theta, rope.scaling, device=device) for rope in c.ropes]
        self._layers = [DecoderLayer(c.of_layer(i), family.norms, kernels, device) for i in self._own_layers]
        self._norm = RmsNorm(kernels, c.hidden_size, c.norm_eps, offset=c.norm_offset, device=device)
        self._head = (
            None
            if c.tied or not self.has_head
            else Linear(kernels, c.hidden_size, {"lm_head": c.vocab_size}, bias=False, device=device, head=True)
        )
        self._softcap = c.logit_softcap
        # For each layer: its KV group, its index in that group's cache, and its rope.
        windows = [group.window for group in self.kv_groups]
        self._homes = [
            (windows.index(window), own_windows[:i].count(window), rope)
            for i, (window, rope) in enumerate(zip(own_windows, c.rope_of[self._own_layers.start :], strict=False))
        ]
        self._together: PreparedLayers | None = None

    def groups_of(self, stage: Share) -> tuple[KvGroup, ...]:
        """The KV groups with the layers of a stage, which may have none of some."""
        layers = stage.of(len(self._windows))
        windows = self._windows[layers.start : layers.stop]
        return tuple(replace(group, layers=windows.count(group.window)) for group in self.all_groups)

    def linears(self) -> list[tuple[str, Linear]]:
        linears = [pair for i, layer in self._numbered() for pair in layer.linears(f"{_LAYERS}{i}.")]
        return linears if self._head is None else [*linears, ("", self._head)]

    def embedding(self) -> tuple[str, Embedding]:
        return _TABLE, self._embedding

    @property
    def head_name(self) -> str:
        """The name prefix of the matrix that makes logits. It is the embedding's if they are tied."""
        return _TABLE if self._head is None else "lm_head"

    def weights(self) -> dict[str, Tensor]:
        places = self._embedding.weights(f"{_TABLE}.") if self._has_table else {}
        if self.has_head:
            places |= self._norm.weights(_NORM)
        for i, layer in self._numbered():
            places |= layer.weights(f"{_LAYERS}{i}.")
        if self._head is not None:
            places |= self._head.weights("")
        return places

    def canonical(self, name: str) -> str | None:
        """The name in `weights` of a checkpoint's tensor. None for a tensor to skip."""
        renamed = self._rename(name)
        # Old checkpoints carry the rotary frequencies; tied ones often a copy of the table as head.
        if renamed is None or renamed.endswith(".rotary_emb.inv_freq") or self._is_elsewhere(renamed):
            return None
        return None if renamed == "lm_head.weight" and self._head is None else renamed

    def elsewhere(self, name: str) -> bool:
        """See Model."""
        renamed = self._rename(name)
        return renamed is not None and self._is_elsewhere(renamed)

    def _is_elsewhere(self, name: str) -> bool:
        if name.startswith(_LAYERS):
            return name[: name.find(".", len(_LAYERS)) + 1] in self._others
        if name.startswith(f"{_TABLE}."):
            return not self._has_table
        return name.startswith((_NORM, "lm_head.")) and not self.has_head

    def _numbered(self) -> list[tuple[int, DecoderLayer]]:
        """The stage's layers with their numbers in the whole model."""
        return list(zip(self._own_layers, self._layers, strict=True))

    def cut(self, name: str) -> Cut | None:
        """See Model."""
        share = self.kernels.share
        return None if share is None else cut_of(name, c=self._whole, share=share)

    def pack(self, fill: Fill = lambda places: None) -> None:
        if self._has_table:
            fill(self._embedding.weights(f"{_TABLE}."))
            self._embedding.pack()
        for i, layer in self._numbered():
            places = layer.weights(f"{_LAYERS}{i}.")
            fill(places)
            if self.kernels.share is not None and self.kernels.share.rank:
                for name, bias in places.items():
                    if name.endswith(SUMMED_BIASES):
                        bias.zero_()
            layer.pack()
        if self.has_head:
            fill(self._norm.weights(_NORM))
            self._norm.pack()
        if not self._whole.bidirectional:  # a native call of all layers reads keys and values from the cache
            parts = [layer.parts(*home) for layer, home in zip(self._layers, self._homes, strict=True)]
            self._together = self.kernels.prepare_layers(parts, self._norm.weight if self.has_head else None)
        if self._head is not None:
            fill(self._head.weights(""))
            self._head.pack()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        long: Tensor | None,
        attention: Sequence[RaggedBatch],
        caches: Sequence[Tensor],
        output_rows: Tensor,
        adapters: StepAdapters | None = None,
        entering: Tensor | None = None,
    ) -> Tensor:
        rotations = self.rotations(positions, long)
        residual = self._embedded(tokens, adapters) if entering is None else entering
        if self._together is not None:
            return self._together(residual, rotations, attention, caches, output_rows, adapters, entering is None)
        if entering is None:
            residual = self.kernels.sum_ranks(residual)
        x = self._layers[0].input_norm(residual)
        for i in range(self.depth):
            last = output_rows if self.has_head and i + 1 == self.depth else None
            x, residual = self.layer(i, x, residual, rotations, attention, caches, last, adapters)
        return x

    def feed_forward(self, i: int) -> GatedMlp | Experts:
        """The feed-forward block of layer `i`."""
        return self._layers[i].mlp

    @property
    def depth(self) -> int:
        """The number of layers that the stage has."""
        return len(self._layers)

    def rotations(self, positions: Tensor, long: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        return [rope(positions, long) for rope in self._ropes]

    def enter(self, tokens: Tensor, adapters: StepAdapters | None = None) -> tuple[Tensor, Tensor]:
        """The input of the first layer, as (x, residual)."""
        residual = self.kernels.sum_ranks(self._embedded(tokens, adapters))
        return self._layers[0].input_norm(residual), residual

    def _embedded(self, tokens: Tensor, adapters: StepAdapters | None) -> Tensor:
        """The embedding's rows [tokens, width]; a rank's are those of its own tokens, and zeros, to be summed."""
        if self.kernels.collectives is not None:
            own = tokens - self.own_tokens.start
            absent = (own < 0) | (own >= len(self.own_tokens))
            return self._embedding(own.masked_fill(absent, 0)).masked_fill(absent[:, None], 0.0)
        if self.kernels.exchange is None:
            return self._embedding(tokens, None if adapters is None else adapters.tokens)
        # By numpy, whose small operations take a tenth of the time of torch's.
        places = tokens.numpy() - self.own_tokens.start
        others = places.view(np.uint64) >= len(self.own_tokens)  # also those below
        places[others] = 0
        rows = self._embedding(torch.from_numpy(places))
        rows.numpy()[others] = 0
        return rows

    def layer(
        self,
        i: int,
        x: Tensor,
        residual: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[RaggedBatch],
        caches: Sequence[Tensor],
        output_rows: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the stage's layer `i`. Returns (x, residual) for the next layer; after the last, x is the stage's output.

        `output_rows`: int64 [rows], the tokens to go on with after attention, those of `adapters.outputs`; None is all.
        """
        layer = self._layers[i]
        group, cache_index, rope = self._homes[i]
        adapted = None if adapters is None else adapters.tokens
        x = layer.attend(x, rotations[rope], caches[group][cache_index], attention[group], adapted)
        if adapters is not None and output_rows is not None:
            adapted = adapters.outputs
        if output_rows is not None:
            x, residual = x[output_rows], residual[output_rows]
        x, residual = layer.middle_norm.add(x, residual)
        x = layer.feed(x, adapted)
        if i + 1 == len(self._layers) and not self.has_head:
            return residual + x, residual
        # The sum and the next layer's norm are one operation, so this takes the norm from the next layer.
        after = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
        return after.add(x, residual)

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """See Model. A rank's share makes those of its own tokens."""
        head = self._logits_of
        logits = head(hidden) if adapters is None else adapters.logits(head, hidden)
        if self._softcap is None:
            return logits
        return logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        # A softcap can make different logits equal, so the argmax before the cap may differ from that after it.
        return None if self._softcap is not None else self.kernels.peaks(self._logits_of, hidden, self.own_tokens.start)

    @property
    def _logits_of(self) -> PreparedLinear:
        head = self._embedding.head if self._head is None else self._head.prepared
        if head is None:
            raise RuntimeError("a model is packed before it runs")
        return head
