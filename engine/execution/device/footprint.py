"""Measures the memory of the largest steps, beside weights and KV cache, by running them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from engine.errors import EngineError
from engine.execution.device.runner import DeviceRunner
from engine.kv import KvSpace, Table
from engine.models import Model
from engine.output import OutputState
from engine.params import SamplingParams
from engine.plan import ScheduledSeq, StepPlan
from engine.request import Request
from engine.sequence import Sequence

logger = logging.getLogger("penstock.engine")

#: Parameters that use all kinds of sampling memory: token counts, sorted logits, log probabilities.
_PARAMS = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=20)
#: The context of decode steps: long enough that attention divides it among as many programs as it ever does.
_CONTEXT = 4096


def largest_steps(
    slots: int, step_tokens: int, length: int, groups: int, block_size: int
) -> Iterator[tuple[int, StepPlan]]:
    """Yield (KV blocks needed in each group, plan) of two steps: `step_tokens` of prompts, and a decode of all slots.

    `length`: the tokens of the longest sequence. All sequences of a step share the same blocks, as their output is
    not used.
    """
    rows = min(slots, step_tokens)
    share, more = divmod(min(step_tokens, rows * length), rows)
    context = min(length, _CONTEXT)
    for parts in ([(share + (i < more),) * 2 for i in range(rows)], [(context, 1)] * slots):
        blocks = -(-parts[0][0] // block_size)
        plan = StepPlan(num_tokens=sum(count for _, count in parts))
        for slot, (tokens, count) in enumerate(parts):
            sequence = dummy_sequence(slot, tokens, _PARAMS, groups, block_size)
            plan.rows.append(ScheduledSeq(sequence, tokens - count, count, samples=True))
        yield blocks, plan


def dummy_sequence(slot: int, tokens: int, params: SamplingParams, groups: int, block_size: int) -> Sequence:
    """A dummy sequence of `tokens` tokens, for measuring and rehearsal. In each KV group it has the first blocks."""
    blocks = -(-tokens // block_size)
    return Sequence(
        request=Request(f"dummy-{slot}", [0] * tokens, params),
        choice=0,
        tokens=[0] * tokens,
        prompt_len=tokens,
        output=OutputState(params, (), None, 1),
        seed=slot,
        serial=slot,
        queued_at=0.0,
        slot=slot,
        tables=[Table(list(range(blocks))) for _ in range(groups)],
    )


def step_bytes(model: Model, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, length: int) -> int:
    """The most bytes that a step takes on the model's CUDA device, beside the weights and the KV cache.

    The memory of decode steps counts twice, because their recordings keep memory of their own. Raises EngineError if
    there is not enough memory for a single step.
    """
    groups = len(model.kv_groups)
    plans = list(largest_steps(max_num_seqs, max_num_batched_tokens, length, groups, block_size))
    before = torch.cuda.memory_allocated(model.device)
    peaks = []
    try:
        runner = DeviceRunner(
            model,
            spaces=[KvSpace(max(blocks for blocks, _ in plans), group.window) for group in model.kv_groups],
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            graphs=False,
        )
        for _, plan in plans:
            torch.cuda.reset_peak_memory_stats(model.device)
            runner.execute(plan)
            peaks.append(torch.cuda.max_memory_allocated(model.device) - before - runner.kv_bytes)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the device has no memory for a step of {max_num_batched_tokens} tokens or of {max_num_seqs} sequences; "
            f"lower max_num_batched_tokens or max_num_seqs: {error}"
        ) from error
    del runner
    torch.cuda.empty_cache()
    prompts, decodes = peaks
    logger.info("the largest steps take %.1f MiB of prompts, %.1f MiB of decodes", prompts / 2**20, decodes / 2**20)
    return max(prompts, decodes) + decodes
