"""How a loaded model is put on its device: memory for its KV cache, and the runner that suits its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.device import DeviceRunner, step_bytes
from engine.errors import EngineError
from engine.kv import KvSpace
from engine.memory import GIB, free_bytes, kv_spaces, release
from engine.models import Model
from engine.runner import Runner

#: What a step may take on a GPU where nobody measures it.
_UNMEASURED = 1 * GIB


def place(model: Model, config: EngineConfig, step_tokens: int, length: int) -> tuple[KvSpace, ...]:
    """The blocks of each of the model's KV groups, for steps of up to `step_tokens` and sequences of up to `length`.

    Raises EngineError where the memory does not hold a single sequence.
    """
    free = 0
    if config.kv_cache_bytes is None:
        step = 0
        if model.device.type == "cuda":
            step = _measured(model, config, step_tokens, length) if model.kernels.ragged else _UNMEASURED
        free = free_bytes(model.device, config.memory_share, step)
    return kv_spaces(
        config.kv_cache_bytes,
        model.kv_groups,
        model.kernels.cache_dtype.itemsize,
        block_size=config.block_size,
        sequences=config.max_num_seqs,
        length=length,
        step_tokens=step_tokens,
        free=free,
    )


def _measured(model: Model, config: EngineConfig, step_tokens: int, length: int) -> int:
    return step_bytes(
        model,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens,
        length=length,
    )


def runner_for(
    model: Model, config: EngineConfig, spaces: Sequence[KvSpace], step_tokens: int, length: int
) -> Runner | DeviceRunner:
    """By which batches the model's kernels read. Raises EngineError where blocks do not suit them, or where there is
    no memory for the cache."""
    if model.kernels.chunk % config.block_size:
        raise EngineError(
            f"deterministic=True needs a block_size that divides {model.kernels.chunk}, and it is {config.block_size}"
        )
    try:
        if not model.kernels.ragged:
            return Runner(model, spaces=spaces, block_size=config.block_size, max_num_seqs=config.max_num_seqs)
        return DeviceRunner(
            model,
            spaces=spaces,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=step_tokens,
            max_model_len=length,
            graphs=config.graphs,
        )
    except Exception as error:
        if not release(error):
            raise
        blocks = " and ".join(str(space.num_blocks) for space in spaces)
        raise EngineError(
            f"{model.device.type} has no memory for a KV cache of {blocks} blocks; lower kv_cache_bytes or "
            f"memory_share: {error}"
        ) from error
