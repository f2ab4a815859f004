"""The share of a decoder that one rank holds: settings of fewer heads, a narrower inside and a part of the vocabulary.

    q, k, v, gate, up, embedding, head   some outputs     a rank computes them from whole rows
    o, down                              some inputs      the ranks' products are summed
    norms, routers                       whole            every rank computes them alike

Where there are fewer KV heads than ranks, neighbouring ranks hold the same KV head. Slices are read from the files: a
rank never holds more of a matrix than its own part. Quantised matrices are read whole, one layer after another, and cut
in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from engine.config import MOST_RANKS
from engine.errors import ErrorText, ModelError
from engine.kernels.native.exchange import Share
from engine.models.settings import DecoderSettings
from engine.text.gguf import GgufTensor
from engine.text.tensors import LocatedTensor, StoredTensor, locate

#: The matrices of fused ones, in order.
_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: The ends of the names of biases that are added to a sum over the ranks, and so by one rank only.
SUMMED_BIASES: Final = ("o_proj.bias", "down_proj.bias")


def check_ranks(folder: Path, c: DecoderSettings, ranks: int, stages: int = 1) -> None:
    """Raise ModelError naming the possible numbers if the model cannot be divided among so many ranks, or its layers
    among so many stages."""
    if stages > c.layers:
        raise ModelError(
            ErrorText.of(
                "{}: {pipeline_parallel}={} is more than its {} layers, of which each stage needs one",
                *(folder, stages, c.layers),
            )
        )
    if ranks not in (counts := possible_ranks(c)):
        raise ModelError(
            ErrorText.of(
                "{}: {tensor_parallel}={} does not divide its {} heads and {} KV heads; possible are {}",
                *(folder, ranks, c.heads, c.kv_heads, ", ".join(map(str, counts))),
            )
        )


def possible_ranks(c: DecoderSettings) -> list[int]:
    """The numbers of ranks among which the model's matrices can be divided."""
    inside = c.intermediate_size if c.experts is None else min(c.intermediate_size, c.experts.width)
    limit = min(c.heads, MOST_RANKS, inside, c.vocab_size)
    return [
        count
        for count in range(1, limit + 1)
        if c.heads % count == 0 and (c.kv_heads % count == 0 or count % c.kv_heads == 0)
    ]


def files_of(folder: Path, *, dates: bool = True) -> str:
    """Differs between ranks that would read other files: of the checkpoint's tensors and files, not of their values.

    `dates`: also where files were written again. Raises ModelError.
    """
    located = locate(folder)
    digest = sha256()
    for path in sorted({tensor.path for tensor in located.values()}):
        stat = path.stat()
        digest.update(f"{path.name}|{stat.st_size}|{stat.st_mtime_ns if dates else ''}|".encode())
    for name, tensor in sorted(located.items()):
        digest.update(f"{name}|{tensor.stored}|".encode())
    return digest.hexdigest()


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


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a matrix of `outputs` and `inputs`."""

    outputs: int
    inputs: int
    own_outputs: range
    own_inputs: range


def cut_of(name: str, *, c: DecoderSettings, share: Share) -> Cut | None:
    """A rank's part of the matrix `name`, as `share_of`'s model names it. None for one that every rank has whole. `c`:
    the whole settings. A part of a fused matrix is cut from that."""
    matrix, width = name.rpartition(".")[2], c.hidden_size
    inside = c.intermediate_size if c.experts is None or ".experts." not in name else c.experts.width
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    heads, kv_heads = _rows(share.of(c.heads), c.head_dim), _rows(_kv_heads(c, share), c.head_dim)
    by_outputs = {
        "q_proj": (q, heads),
        "k_proj": (kv, kv_heads),
        "v_proj": (kv, kv_heads),
        "gate_proj": (inside, share.of(inside)),
        "up_proj": (inside, share.of(inside)),
        "embed_tokens": (c.vocab_size, share.of(c.vocab_size)),
        "lm_head": (c.vocab_size, share.of(c.vocab_size)),
    }
    by_inputs = {"o_proj": (q, heads), "down_proj": (inside, share.of(inside))}
    if matrix in by_inputs:
        inputs, kept = by_inputs[matrix]
        return Cut(width, inputs, range(width), kept)
    if matrix not in by_outputs:
        return None
    kept = by_outputs[matrix][1]
    parts: tuple[str, ...] = next((parts for parts in _FUSED.values() if c.fused and matrix in parts), (matrix,))
    before = sum(by_outputs[part][0] for part in parts[: parts.index(matrix)])
    every = sum(by_outputs[part][0] for part in parts)
    return Cut(every, width, range(before + kept.start, before + kept.stop), range(width))


def shares_of(
    matched: Mapping[str, LocatedTensor], c: DecoderSettings, share: Share, whole: Collection[str] = ()
) -> dict[str, LocatedTensor]:
    """A rank's parts of a checkpoint's tensors, by the names of `share_of`'s model. `c`: the whole settings. `whole`:
    the names of tensors that are read whole."""
    parts: dict[str, LocatedTensor] = {}
    for name, located in matched.items():
        base, _, end = name.rpartition(".")
        above, _, matrix = base.rpartition(".")
        for part in [f"{above}.{part}" for part in _FUSED.get(matrix, ())] or [base]:
            cut = None if name in whole else cut_of(part, c=c, share=share)
            if cut is None:
                parts[f"{part}.{end}"] = located
            elif len(cut.own_inputs) == cut.inputs:
                parts[f"{part}.{end}"] = narrowed(located, 0, cut.own_outputs)
            else:
                parts[f"{part}.{end}"] = narrowed(located, 1, cut.own_inputs) if end == "weight" else located
    return parts


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def narrowed(located: LocatedTensor, dimension: int, kept: range) -> LocatedTensor:
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
    if isinstance(located, GgufTensor):
        located = replace(located, whole=located.whole or located.stored)
    return replace(located, stored=StoredTensor(located.stored.dtype, tuple(shape)), part=tuple(indexes))
