"""Copies a checkpoint's tensors into the memory that a model made for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.text.checkpoint import StoredTensor, read_header
from engine.text.folder import file_in

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

#: The largest index file that is read, in bytes. Those of the largest checkpoints have some 10 MB.
_LONGEST_INDEX = 64 << 20
_FLOATS = ("F32", "F16", "BF16")
#: A tensor of fewer values is copied by one thread, in a millisecond at most. To wake the others for it takes longer,
#: and much longer on a busy machine.
_FEW = 1 << 20
#: The only stored type accepted for each dtype that is not floating point, and for 8-bit floats.
_EXACT = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}


#: Fills tensors, by the model's names.
Fill = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class Found:
    """The location of a tensor, with its entry in the file's header."""

    path: Path
    name: str
    """Its name in the file."""
    stored: StoredTensor


def match(
    folder: Path, located: Mapping[str, Found], places: Mapping[str, Tensor], canonical: Callable[[str], str | None]
) -> dict[str, Found]:
    """Find the checkpoint's tensor for each of `places`: a model's tensor name -> a tensor of the wanted shape and
    dtype.

    It reads headers alone, so that a wrong config.json is refused before any memory is allocated. `canonical` maps a
    checkpoint's names to the model's, None for a tensor to skip. Raises ModelError naming a tensor that is missing, has
    a wrong shape or type, or is not used by the model: ignoring a bias would silently give other output.
    """
    found: dict[str, Found] = {}
    extra = []
    for name, one in located.items():
        ours = canonical(name)
        if ours is None:
            continue
        if ours in found:
            raise ModelError(f"{folder}: the checkpoint has {ours} twice, as {found[ours].name} and as {name}")
        if ours in places:
            found[ours] = one
        else:
            extra.append(name)
    missing = sorted(places.keys() - found.keys())
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {_listing(missing)}")
    if extra:
        raise ModelError(
            f"{folder}: the checkpoint has tensors that this architecture does not use: {_listing(sorted(extra))}"
        )
    for name, one in found.items():
        shape, asked = list(one.stored.shape), list(places[name].shape)
        if shape != asked:
            raise ModelError(f"{one.path}: {one.name} has shape {shape}; config.json asks for {asked}")
        exact = _EXACT.get(places[name].dtype)
        if one.stored.dtype not in (_FLOATS if exact is None else (exact,)):
            expected = f"one of {', '.join(_FLOATS)}" if exact is None else exact
            raise ModelError(f"{one.path}: {one.name} is stored as {one.stored.dtype}; {expected} is expected")
    return found


@contextmanager
def weights_of(found: Mapping[str, Found], dtype: torch.dtype, exact: Collection[str] = frozenset()) -> Iterator[Fill]:
    """Open a checkpoint's files. Yields a function that fills tensors with those that `match` found.

    The tensors named in `exact` are copied as stored, the others are rounded to `dtype` on the way. Files are
    memory-mapped: each tensor goes from the page cache to its place, without a second copy of the model. Raises
    ModelError naming a malformed file.
    """
    files = {}
    with ExitStack() as opened:
        for path in {one.path for one in found.values()}:
            with _faults_named(path):
                files[path] = opened.enter_context(safe_open(path, framework="pt"))

        def fill(places: Mapping[str, Tensor]) -> None:
            with _threads_restored(torch.get_num_threads()) as threads:
                for name, place in places.items():
                    with _faults_named(found[name].path):
                        tensor = files[found[name].path].get_tensor(found[name].name)
                    torch.set_num_threads(1 if tensor.numel() < _FEW else threads)
                    # The place may be wider than dtype (on a CPU without bf16). The values are rounded to dtype all
                    # the same.
                    place.copy_(tensor if tensor.dtype == dtype or name in exact else tensor.to(dtype))

        yield fill


@contextmanager
def _threads_restored(threads: int) -> Iterator[int]:
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def locate(folder: Path) -> dict[str, Found]:
    """Every tensor of a folder's checkpoint, found by the index if there is one. Raises ModelError."""
    index = file_in(folder, INDEX)
    if index is None:
        path = file_in(folder, SINGLE)
        if path is None:
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return {name: Found(path, name, stored) for name, stored in _header(path).items()}
    held: dict[str, tuple[Path, dict[str, StoredTensor]]] = {}
    found = {}
    for name, shard in _weight_map(index).items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelError(
                f"{index}: {name} is said to be in {shard!r}, which is not the name of a safetensors file beside it"
            )
        if shard not in held:
            path = file_in(folder, shard)
            if path is None:
                raise ModelError(f"{folder}: the shard {shard}, named by {INDEX}, is missing")
            held[shard] = path, _header(path)
        path, tensors = held[shard]
        if name not in tensors:
            raise ModelError(f"{path} does not hold {name}, although {INDEX} says so")
        found[name] = Found(path, name, tensors[name])
    return found


def _weight_map(index: Path) -> dict[str, object]:
    try:
        with index.open("rb") as file:
            data = file.read(_LONGEST_INDEX + 1)
        if len(data) > _LONGEST_INDEX:
            raise ModelError(f"{index} is longer than {_LONGEST_INDEX} bytes: it is no weight map")
        shard_of = json.loads(data)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} cannot be read as a weight map: {error!r}") from error
    if not isinstance(shard_of, dict):
        raise ModelError(f"{index}: weight_map is not an object")
    return shard_of


def _is_plain_name(shard: str) -> bool:
    # An index is untrusted data: it must not name other files of this machine.
    return Path(shard).name == shard and "\\" not in shard and "\0" not in shard and shard.endswith(".safetensors")


def _header(path: Path) -> dict[str, StoredTensor]:
    with _faults_named(path):
        return read_header(path)


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _listing(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
