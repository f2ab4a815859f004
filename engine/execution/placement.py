"""Places a loaded model on its device: sizes the KV cache and picks the runner for the model's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ErrorText
from engine.execution.device import DeviceRunner, rehearse, step_bytes
from engine.execution.device.sampler import needs_host_token
from engine.execution.ranks.device import DeviceLead, RanksDeviceRunner, StagesDeviceRunner
from engine.execution.ranks.runner import LeadModel, RanksRunner
from engine.execution.ranks.stages import StagedModel, StagesRunner
from engine.execution.runner import Runner
from engine.kernels.native.exchange import Share
from engine.kv import Capacity, KvSpace
from engine.memory import GIB, block_bytes, free_bytes, kv_spaces, release
from engine.models import Model
from engine.speculate import Lookup, Proposer, Speculation
from engine.speculate.draft import DraftModel

#: The default of max_num_seqs. An H200 decodes 1.8 times as many tokens a second at 256 sequences of 8B as at 64.
SEQUENCES = {"cpu": 64, "cuda": 256}
#: The default of max_num_batched_tokens: enough for full use of the device, and few enough that sequences that decode
#: beside a long prompt go on smoothly.
_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
#: The assumed memory of a step, in bytes, on a GPU where it is not measured.
_UNMEASURED = 1 * GIB
#: Devices on which kernels are compiled and steps recorded. Both are done before the first request.
REHEARSED = frozenset({"cuda"})
#: On a CPU, the number of blocks to keep side by side, and the bytes per layer from which a single block is long
#: enough.
_RUN = 8
_LONG = 64 << 10


def plan_capacity(model: Model, config: EngineConfig, draft: Model | None = None) -> Capacity:
    """Size what the engine holds: each KV group of the model, a step and a sequence.

    `draft`: a draft model whose KV cache takes part of the memory. Raises EngineError if the memory does not hold a
    single sequence.
    """
    sequences, step_tokens = step_limits(model.device, config)
    length = model.context_length if config.max_model_len is None else config.max_model_len
    if length > model.context_length:
        raise EngineError(
            ErrorText.of(
                "{max_model_len}={} is more than the model's context of {} tokens", length, model.context_length
            )
        )
    capacity = Capacity((), config.block_size, sequences, step_tokens, length, config.max_non_priority_step_tokens)
    return replace(capacity, spaces=_spaces(model, config, capacity, draft))


def step_limits(device: torch.device, config: EngineConfig) -> tuple[int, int]:
    """The maximum numbers of sequences and of tokens of a step."""
    limits = (SEQUENCES[device.type], config.max_num_batched_tokens, config.max_non_priority_step_tokens)
    sequences = config.max_num_seqs or min(limit for limit in limits if limit is not None)
    return sequences, config.max_num_batched_tokens or max(_STEP_TOKENS[device.type], sequences)


def _spaces(model: Model, config: EngineConfig, capacity: Capacity, draft: Model | None) -> tuple[KvSpace, ...]:
    kernels, size = model.kernels, config.block_size
    whole = model.share.all_groups if isinstance(model, LeadModel) else model.kv_groups
    groups = [replace(group, head_dim=kernels.cache_width(group.head_dim)) for group in whole]
    layer_bytes = [block_bytes(replace(group, layers=1), size, kernels.cache_dtype.itemsize) for group in groups]
    # Every rank has as many blocks, each of its own KV heads and layers. A GPU's are to fit into what it has left; on
    # CPUs all ranks' together into what a process may take, on the machine with the least memory.
    within_each = config.kv_cache_bytes is None and model.device.type != "cpu"
    layers = _most_layers(model) if within_each else [group.layers for group in groups]
    sizes = [each * count for each, count in zip(layer_bytes, layers, strict=True)]
    if draft is not None:
        drafts = (block_bytes(group, size, draft.kernels.cache_dtype.itemsize) for group in draft.kv_groups)
        sizes[whole_group(model)] += sum(drafts)
    free = _free(model, config, capacity, draft) if config.kv_cache_bytes is None else 0
    if not within_each:
        sizes = [each * config.tensor_parallel for each in sizes]
    spaces = kv_spaces(config.kv_cache_bytes, groups, sizes, capacity, free)
    if model.device.type != "cpu":
        return spaces
    return tuple(
        replace(space, run=_RUN if each < _LONG else 1) for space, each in zip(spaces, layer_bytes, strict=True)
    )


def _most_layers(model: Model) -> list[int]:
    """The most layers of each KV group that a rank has: those of a group may lie in few stages, or unevenly."""
    if not isinstance(model, DeviceLead):
        return [group.layers for group in model.kv_groups]
    stages = model.communicators.stage.ranks
    groups = [model.share.groups_of(Share(stage, stages)) for stage in range(stages)]
    return [max(group.layers for group in of_stages) for of_stages in zip(*groups, strict=True)]


def _free(model: Model, config: EngineConfig, capacity: Capacity, draft: Model | None) -> int:
    """The bytes that the KV cache may take beside the steps."""
    step = 0
    if model.device.type == "cuda":
        # The two models run in turn, but their recorded graphs keep memory, so both steps are added up.
        for resident in (model, draft):
            if resident is not None:
                step += _measured(resident, capacity) if resident.kernels.ragged else _UNMEASURED
    if isinstance(model, LeadModel):
        return model.least_free_bytes(config.memory_share, step, config.share)
    return free_bytes(model.device, config.memory_share, step, config.share)


def whole_group(model: Model) -> int:
    """The index of the KV group whose block tables the draft model shares: one without a window. Raises EngineError if
    there is none."""
    index = next((i for i, group in enumerate(model.kv_groups) if group.window is None), None)
    if index is None:
        windows = ", ".join(str(group.window) for group in model.kv_groups)
        raise EngineError(
            ErrorText.of(
                "{speculate}='draft' needs a model of which some layers see all of a sequence, and all of this one's "
                "see {} tokens back; use 'lookup' or 'none'",
                windows,
            )
        )
    return index


def speculation_for(
    model: Model,
    draft: Model | None,
    config: EngineConfig,
    capacity: Capacity,
    runner: Runner | DeviceRunner,
) -> Speculation | None:
    """The speculation that `config` asks for, or None. Raises EngineError as `runner_for` does."""
    if config.speculate == "none":
        return None
    proposer: Proposer
    if config.speculate == "lookup":
        proposer = Lookup(capacity.max_num_seqs, model.vocab_size)
    elif draft is None:
        raise EngineError(ErrorText.of("{speculate}='draft' is without its model: it comes with Engine.load"))
    else:
        whole = whole_group(model)
        # A draft model catches up with a sequence by whole blocks.
        step_tokens = max(capacity.max_num_batched_tokens, config.block_size)
        places = [KvSpace(capacity.spaces[whole].num_blocks, group.window) for group in draft.kv_groups]
        theirs = replace(capacity, spaces=places, max_num_batched_tokens=step_tokens)
        executor = runner_for(draft, config, theirs)
        proposer = DraftModel(executor, theirs, table=whole, context_length=draft.context_length)
    return Speculation(
        proposer,
        max_tokens=config.speculate_tokens,
        adaptive=config.speculate_adaptive,
        rope_switch=model.rope_switch,
        # A device follows no form, nor words of several tokens, from one draft token to the next.
        barred=needs_host_token if isinstance(runner, DeviceRunner) else lambda seq: False,
    )


def while_idle(runner: Runner | DeviceRunner) -> Callable[[], bool] | None:
    """The runner's work for idle times, if it has any. Each call records one more decode step, and returns False if
    none is left."""
    return runner.record_next if isinstance(runner, DeviceRunner) and runner.device.type in REHEARSED else None


def _measured(model: Model, capacity: Capacity) -> int:
    return step_bytes(
        model,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        length=capacity.max_model_len,
        make=device_runner_of(model),
    )


def device_runner_of(model: Model) -> type[DeviceRunner]:
    """The class of the runner of a model whose kernels are ragged."""
    if not isinstance(model, DeviceLead):
        return DeviceRunner
    return StagesDeviceRunner if model.staged else RanksDeviceRunner


def _runner_of(model: Model) -> type[Runner]:
    if isinstance(model, StagedModel):
        return StagesRunner
    return RanksRunner if isinstance(model, LeadModel) else Runner


def runner_for(model: Model, config: EngineConfig, capacity: Capacity) -> Runner | DeviceRunner:
    """Make the runner that suits the model's kernels. Raises EngineError if there is no memory for the KV cache."""
    try:
        if not model.kernels.ragged:
            return _runner_of(model)(
                model, spaces=capacity.spaces, block_size=config.block_size, max_num_seqs=capacity.max_num_seqs
            )
        runner = device_runner_of(model)(
            model,
            spaces=capacity.spaces,
            block_size=config.block_size,
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            graphs=config.graphs,
        )
        if model.device.type in REHEARSED:
            rehearse(runner)
        return runner
    except Exception as error:
        if not release(error):
            raise
        blocks = " and ".join(str(space.num_blocks) for space in capacity.spaces)
        raise EngineError(
            ErrorText.of(
                "{} has no memory for a KV cache of {} blocks; lower {kv_cache_bytes} or {memory_share}: {}",
                model.device.type,
                blocks,
                error,
            )
        ) from error
