"""Copies a checkpoint's tensors into the memory that a model made for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.quant.formats.gguf import unpacked
from engine.text.gguf import GgufTensor
from engine.text.tensors import BLOCKS, LocatedTensor, StoredTensor

#: The floating types of tensors.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: The numbers of a GGUF file's tensor that are unpacked at one time.
_AT_ONCE = 1 << 22
#: A tensor of fewer values is copied by one thread, in a millisecond at most. To wake the others for it takes longer,
#: and much longer on a busy machine.
_FEW = 1 << 20
#: The only stored type accepted for each dtype that is not floating point, and for 8-bit floats.
_EXACT = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}
#: The most experts of all layers together: some ten times the largest known.
_MOST_EXPERTS = 1 << 18
#: The ends of the names of tensors that hold all experts of a layer, as transformers 5 holds them in memory.
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"

#: Fills tensors, by the model's names.
Fill = Callable[[Mapping[str, Tensor]], None]
#: Gets the bytes of a checkpoint's tensors that were read so far, and those of all that are to be read.
Progress = Callable[[int, int], None]


def match(
    folder: Path,
    located: Mapping[str, LocatedTensor],
    places: Mapping[str, Tensor],
    canonical: Callable[[str], str | None],
) -> dict[str, LocatedTensor]:
    """Find the checkpoint's tensor for each of `places`: a model's tensor name -> a tensor of the wanted shape and
    dtype.

    It reads headers alone, so that a wrong config.json is refused before any memory is allocated. `canonical` maps a
    checkpoint's names to the model's, None for a tensor to skip. Raises ModelError naming a tensor that is missing, has
    a wrong shape or type, or is not used by the model: ignoring a bias would silently give other output.
    """
    matched: dict[str, LocatedTensor] = {}
    extra = []
    for name, tensor in located.items():
        ours = canonical(name)
        if ours is None:
            continue
        if ours in matched:
            raise ModelError(f"{folder}: the checkpoint has {ours} twice, as {matched[ours].name} and as {name}")
        if ours in places:
            matched[ours] = tensor
        else:
            extra.append(name)
    missing = sorted(places.keys() - matched.keys())
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {_listing(missing)}")
    if extra:
        raise ModelError(
            f"{folder}: the checkpoint has tensors that this architecture does not use: {_listing(sorted(extra))}"
        )
    for name, tensor in matched.items():
        shape, expected_shape = list(tensor.stored.shape), list(places[name].shape)
        if places[name].dtype == torch.uint8 and isinstance(tensor, GgufTensor):  # blocks as they are
            shape = [shape[0], tensor.stored.nbytes // shape[0]]
        if shape != expected_shape:
            raise ModelError(f"{tensor.path}: {tensor.name} has shape {shape}; config.json asks for {expected_shape}")
        exact = None if isinstance(tensor, GgufTensor) else _EXACT.get(places[name].dtype)
        floats = (*FLOATS, *BLOCKS) if isinstance(tensor, GgufTensor) else tuple(FLOATS)
        if tensor.stored.dtype not in (floats if exact is None else (exact,)):
            expected = f"one of {', '.join(floats)}" if exact is None else exact
            raise ModelError(f"{tensor.path}: {tensor.name} is stored as {tensor.stored.dtype}; {expected} is expected")
    return matched


@contextmanager
def weights_of(
    located: Mapping[str, LocatedTensor],
    dtype: torch.dtype,
    exact: Collection[str] = frozenset(),
    progress: Progress = lambda done, total: None,
) -> Iterator[Fill]:
    """Open a checkpoint's files. Yields a function that fills tensors with the tensors that `match` has located.

    The tensors named in `exact` are copied as stored, the others are rounded to `dtype` on the way. Files are
    memory-mapped: each tensor goes from the page cache to its place, without a second copy of the model. `progress` is
    called after each tensor. Raises ModelError naming a malformed file.
    """
    files = {}
    done, total = 0, sum(tensor.stored.nbytes for tensor in located.values())
    with ExitStack() as opened:
        for tensor in located.values():
            if tensor.path not in files:
                files[tensor.path] = opened.enter_context(opened_file(tensor))

        def fill(places: Mapping[str, Tensor]) -> None:
            nonlocal done
            with _threads_restored(torch.get_num_threads()) as threads:
                for name, destination in places.items():
                    torch.set_num_threads(1 if destination.numel() < _FEW else threads)
                    with _faults_named(located[name].path):
                        for target, part in _parts(files[located[name].path], located[name], destination):
                            # The place may be wider than dtype (on a CPU without bf16). The values are rounded to
                            # dtype all the same.
                            target.copy_(part if part.dtype == dtype or name in exact else part.to(dtype))
                    done += located[name].stored.nbytes
                    progress(done, total)

        yield fill


def opened_file(located: LocatedTensor) -> AbstractContextManager[Any]:
    """The file of a tensor, memory-mapped: safetensors' own object, or a GGUF file's bytes. Raises ModelError."""
    with _faults_named(located.path):
        if isinstance(located, GgufTensor):
            size = located.path.stat().st_size
            return nullcontext(torch.from_file(str(located.path), shared=False, size=size, dtype=torch.uint8))
        file: AbstractContextManager[Any] = safe_open(located.path, framework="pt")
        return file


def read(file: Any, located: LocatedTensor) -> Tensor:
    """Read a tensor, or its part, from its open file. Quantised types of GGUF become fp32."""
    if isinstance(located, GgufTensor):
        whole = replace(located, stored=located.whole or located.stored)
        rows = torch.cat([part for _, part in gguf_rows(file, whole)]).view(whole.stored.shape)
        return rows[located.part] if located.part else rows
    tensor: Tensor = file.get_slice(located.name)[located.part] if located.part else file.get_tensor(located.name)
    return tensor


def _parts(file: Any, located: LocatedTensor, destination: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a part of `destination` and what belongs there."""
    if not isinstance(located, GgufTensor):
        yield destination, read(file, located)
        return
    if located.part:
        yield destination, read(file, located)
        return
    rows = destination if destination.dim() == 2 else destination.unsqueeze(1)
    for start, part in gguf_rows(file, located, stored=destination.dtype == torch.uint8):
        yield rows[start : start + len(part)], part


def gguf_rows(content: Tensor, located: GgufTensor, *, stored: bool = False) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor in transformers' order, some at a time: the index of the first, and the rows, [rows, width].

    `content`: the file's bytes. `stored`: as bytes. Otherwise floating types are as stored, and others fp32.
    """
    kind, shape = located.stored.dtype, located.stored.shape
    # Norms and biases have one number a row.
    width = shape[1] if len(shape) == 2 else 1 if kind in FLOATS else shape[0]
    count, size = math.prod(shape) // width, StoredTensor(kind, (width,)).nbytes
    content = content[located.offset : located.offset + count * size].view(count, size)
    order = torch.arange(count)
    if located.heads:
        order = order.view(located.heads, -1, 2).transpose(1, 2).flatten()
    for start in range(0, count, step := max(1, _AT_ONCE // width)):
        rows = content[order[start : start + step]] if located.heads else content[start : start + step].clone()
        if not stored:
            rows = rows.view(FLOATS[kind]) if kind in FLOATS else unpacked(kind, rows).weights()
            rows = rows.float().sub_(located.less) if located.less else rows
        yield start, rows


@contextmanager
def _threads_restored(threads: int) -> Iterator[int]:
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _listing(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def separate(located: Mapping[str, LocatedTensor]) -> dict[str, LocatedTensor]:
    """The tensors of a checkpoint, with an entry for each matrix of each expert, also where all experts of a layer are
    in one tensor: [experts, 2 * inner, width] for gate and up, [experts, width, inner] for down.

    Raises ModelError if there are more experts than a model may have.
    """
    separated: dict[str, LocatedTensor] = {}
    parts = 0
    for name, located_tensor in located.items():
        whole = name.endswith((_GATE_UP, _DOWN)) and len(located_tensor.stored.shape) == 3
        parts += located_tensor.stored.shape[0] if whole else 0
        if parts > 2 * _MOST_EXPERTS:
            raise ModelError(
                f"{located_tensor.path}: {name} has {located_tensor.stored.shape[0]} experts, more than are supported"
            )
        separated |= dict(_matrices(name, located_tensor)) if whole else {name: located_tensor}
    return separated


def _matrices(name: str, located: LocatedTensor) -> Iterator[tuple[str, LocatedTensor]]:
    experts, outputs, inputs = located.stored.shape
    base = name.rpartition(".")[0]
    half = outputs // 2
    both = [("gate_proj", 0, half), ("up_proj", half, outputs)]
    kinds = both if name.endswith(_GATE_UP) else [("down_proj", 0, outputs)]
    for i in range(experts):
        for kind, start, end in kinds:
            stored = StoredTensor(located.stored.dtype, (end - start, inputs))
            yield f"{base}.{i}.{kind}.weight", replace(located, stored=stored, part=(i, slice(start, end)))


def split_fused(located: Mapping[str, LocatedTensor], fused: Mapping[str, Sequence[str]]) -> dict[str, LocatedTensor]:
    """The tensors of a checkpoint, with an entry for each matrix that is stored within another, and for its bias.

    `fused`: the last part of a matrix's name -> the names of the equal parts of its outputs; they follow its own name.
    """
    split: dict[str, LocatedTensor] = {}
    for name, whole in located.items():
        matrix, _, end = name.rpartition(".")
        parts = fused.get(matrix.rpartition(".")[2], ())
        outputs = whole.stored.shape[0] if whole.stored.shape else 0
        if not parts or outputs % len(parts):
            split[name] = whole
            continue
        step = outputs // len(parts)
        stored = StoredTensor(whole.stored.dtype, (step, *whole.stored.shape[1:]))
        for i, part in enumerate(parts):
            split[f"{matrix}.{part}.{end}"] = replace(whole, stored=stored, part=(slice(i * step, (i + 1) * step),))
    return split
