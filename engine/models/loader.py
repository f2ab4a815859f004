"""Checkpoint tensors into the places that a model made for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_weights(folder: Path, places: dict[str, Tensor], dtype: torch.dtype, unused: Callable[[str], bool]) -> None:
    """Fill every tensor of `places` (checkpoint name -> view) from the safetensors in `folder`.

    Files are memory-mapped: each tensor goes from the page cache to its place, rounded to `dtype` on the way,
    without a second copy of the model. Raises ModelError naming the file and the tensor for: a missing, misshapen
    or non-float tensor, one that the model has no use for (unless `unused` says so: ignoring a bias would give
    other output without a word), a truncated or malformed file, a shard outside of the folder.
    """
    files = locate(folder)
    missing = sorted(places.keys() - files.keys())
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {_listing(missing)}")
    extra = sorted(name for name in files.keys() - places.keys() if not unused(name))
    if extra:
        raise ModelError(f"{folder}: the checkpoint has tensors that this architecture does not use: {_listing(extra)}")
    shards: dict[Path, list[str]] = defaultdict(list)
    for name in places:
        shards[files[name]].append(name)
    for path, names in shards.items():
        with _faults_named(path), safe_open(path, framework="pt") as file:
            for name in names:
                _fill(path, name, places[name], file.get_tensor(name), dtype)


def _fill(path: Path, name: str, place: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.shape != place.shape:
        raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelError(f"{path}: {name} is stored as {tensor.dtype}; float16, bfloat16 or float32 is expected")
    # The place may be wider than dtype (a CPU without bf16): the rounding happens all the same.
    place.copy_(tensor if tensor.dtype == dtype else tensor.to(dtype))


def locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, from the index if there is one. Raises ModelError."""
    index = folder / INDEX
    if not index.is_file():
        path = folder / SINGLE
        if not path.is_file():
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(_names(path), path)
    try:
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index} cannot be read as a weight map: {error!r}") from error
    if not isinstance(shard_of, dict):
        raise ModelError(f"{index}: weight_map is not an object")
    held: dict[str, set[str]] = {}
    files = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelError(
                f"{index}: {name} is said to be in {shard!r}, which is not the name of a safetensors file beside it"
            )
        path = folder / shard
        if shard not in held:
            if not path.is_file():
                raise ModelError(f"{folder}: the shard {shard}, named by {INDEX}, is missing")
            held[shard] = set(_names(path))
        if name not in held[shard]:
            raise ModelError(f"{path} does not hold {name}, although {INDEX} says so")
        files[name] = path
    return files


def _is_plain_name(shard: str) -> bool:
    # An index is data from elsewhere: it must not reach other files of this machine.
    return Path(shard).name == shard and "\\" not in shard and shard.endswith(".safetensors")


def _names(path: Path) -> list[str]:
    with _faults_named(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


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
