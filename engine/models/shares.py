"""The share of a decoder that one rank holds: settings of fewer heads, a narrower inside and a part of the vocabulary.

    q, k, v, gate, up, embedding, head   some outputs     a rank computes them from whole rows
    o, down                              some inputs      the ranks' products are summed
    norms, routers                       whole            every rank computes them alike

Where there are fewer KV heads than ranks, neighbouring ranks hold the same KV head. Slices are read from the files: a
rank never holds more of a matrix than its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.errors import ErrorText, ModelError
from engine.kernels.native.exchange import Share
from engine.models.settings import DecoderSettings
from engine.text.tensors import LocatedTensor, StoredTensor

#: The ends of the names of biases that are added to a sum over the ranks, and so by one rank only.
SUMMED_BIASES: Final = ("o_proj.bias", "down_proj.bias")


def check_ranks(folder: Path, c: DecoderSettings, ranks: int) -> None:
    """Raise ModelError naming the possible numbers if the model cannot be divided among so many ranks."""
    inside = c.intermediate_size if c.experts is None else min(c.intermediate_size, c.experts.width)

    def possible(count: int) -> bool:
        whole = c.heads % count == 0 and (c.kv_heads % count == 0 or count % c.kv_heads == 0)
        return whole and count <= min(inside, c.vocab_size)

    if not possible(ranks):
        counts = ", ".join(str(count) for count in range(1, c.heads + 1) if possible(count))
        raise ModelError(
            ErrorText.of(
                "{}: {tensor_parallel}={} does not divide its {} heads and {} KV heads; possible are {}",
                *(folder, ranks, c.heads, c.kv_heads, counts),
            )
        )


def share_of(c: DecoderSettings, share: Share) -> DecoderSettings:
    """A rank's settings. The checkpoint's fused matrices are separate ones in it."""
    return replace(
        c,
        heads=len(share.of(c.heads)),
        kv_heads=len(_kv_heads(c, share)),
        intermediate_size=len(share.of(c.intermediate_size)),
        vocab_size=len(share.of(c.vocab_size)),
        fused=False,
        experts=None if c.experts is None else replace(c.experts, width=len(share.of(c.experts.width))),
    )


def _kv_heads(c: DecoderSettings, share: Share) -> range:
    if c.kv_heads % share.ranks:
        first = share.rank * c.kv_heads // share.ranks
        return range(first, first + 1)
    return share.of(c.kv_heads)


def shares_of(matched: Mapping[str, LocatedTensor], c: DecoderSettings, share: Share) -> dict[str, LocatedTensor]:
    """A rank's parts of a whole checkpoint's tensors, by the names of `share_of`'s model. `c`: the whole settings."""
    return {
        part: narrowed for name, located in matched.items() for part, narrowed in _separate(name, located, c, share)
    }


def _separate(
    name: str, located: LocatedTensor, c: DecoderSettings, share: Share
) -> Iterator[tuple[str, LocatedTensor]]:
    base, _, end = name.rpartition(".")
    base, _, matrix = base.rpartition(".")
    heads, kv_heads = _rows(share.of(c.heads), c.head_dim), _rows(_kv_heads(c, share), c.head_dim)
    q, kv, inside = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate_size
    outputs = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    if matrix == "qkv_proj":
        starts = {"q_proj": 0, "k_proj": q, "v_proj": q + kv}
        parts = {part: _after(start, outputs[part]) for part, start in starts.items()}
    elif matrix == "gate_up_proj":
        own = share.of(inside)
        parts = {"gate_proj": own, "up_proj": _after(inside, own)}
    elif matrix in outputs:
        parts = {matrix: outputs[matrix]}
    elif matrix in ("gate_proj", "up_proj", "embed_tokens", "lm_head"):
        parts = {matrix: share.of(located.stored.shape[0])}
    else:
        if end == "weight" and matrix == "o_proj":
            located = _narrowed(located, 1, heads)
        if end == "weight" and matrix == "down_proj":
            located = _narrowed(located, 1, share.of(located.stored.shape[1]))
        yield name, located
        return
    for part, rows in parts.items():
        yield f"{base}.{part}.{end}" if base else f"{part}.{end}", _narrowed(located, 0, rows)


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _after(start: int, rows: range) -> range:
    return range(start + rows.start, start + rows.stop)


def _narrowed(located: LocatedTensor, dimension: int, kept: range) -> LocatedTensor:
    """A part of a tensor, which may be a part of a file's tensor itself."""
    indexes = list(located.part)
    kinds = [i for i, index in enumerate(indexes) if isinstance(index, slice)]
    while len(kinds) <= dimension:
        kinds.append(len(indexes))
        indexes.append(slice(None))
    whole = indexes[kinds[dimension]]
    start = whole.start or 0 if isinstance(whole, slice) else 0
    indexes[kinds[dimension]] = slice(start + kept.start, start + kept.stop)
    shape = list(located.stored.shape)
    shape[dimension] = len(kept)
    return replace(located, stored=StoredTensor(located.stored.dtype, tuple(shape)), part=tuple(indexes))
