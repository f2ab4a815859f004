"""Copies a checkpoint's tensors into the memory that a model made for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.text.tensors import LocatedTensor

_FLOATS = ("F32", "F16", "BF16")
#: A tensor of fewer values is copied by one thread, in a millisecond at most. To wake the others for it takes longer,
#: and much longer on a busy machine.
_FEW = 1 << 20
#: The only stored type accepted for each dtype that is not floating point, and for 8-bit floats.
_EXACT = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}


#: Fills tensors, by the model's names.
Fill = Callable[[Mapping[str, Tensor]], None]


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
        if shape != expected_shape:
            raise ModelError(f"{tensor.path}: {tensor.name} has shape {shape}; config.json asks for {expected_shape}")
        exact = _EXACT.get(places[name].dtype)
        if tensor.stored.dtype not in (_FLOATS if exact is None else (exact,)):
            expected = f"one of {', '.join(_FLOATS)}" if exact is None else exact
            raise ModelError(f"{tensor.path}: {tensor.name} is stored as {tensor.stored.dtype}; {expected} is expected")
    return matched


@contextmanager
def weights_of(
    found: Mapping[str, LocatedTensor], dtype: torch.dtype, exact: Collection[str] = frozenset()
) -> Iterator[Fill]:
    """Open a checkpoint's files. Yields a function that fills tensors with those that `match` found.

    The tensors named in `exact` are copied as stored, the others are rounded to `dtype` on the way. Files are
    memory-mapped: each tensor goes from the page cache to its place, without a second copy of the model. Raises
    ModelError naming a malformed file.
    """
    files = {}
    with ExitStack() as opened:
        for path in {tensor.path for tensor in found.values()}:
            with _faults_named(path):
                files[path] = opened.enter_context(safe_open(path, framework="pt"))

        def fill(places: Mapping[str, Tensor]) -> None:
            with _threads_restored(torch.get_num_threads()) as threads:
                for name, destination in places.items():
                    with _faults_named(found[name].path):
                        tensor = read(files[found[name].path], found[name])
                    torch.set_num_threads(1 if tensor.numel() < _FEW else threads)
                    # The place may be wider than dtype (on a CPU without bf16). The values are rounded to dtype all
                    # the same.
                    destination.copy_(tensor if tensor.dtype == dtype or name in exact else tensor.to(dtype))

        yield fill


def read(file: Any, located: LocatedTensor) -> Tensor:
    """Read a tensor, or its part, from its open safetensors file."""
    tensor: Tensor = file.get_slice(located.name)[located.part] if located.part else file.get_tensor(located.name)
    return tensor


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
