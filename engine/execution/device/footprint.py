"""What the largest steps take beside weights and KV cache, found out by running them."""

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

#: All that takes memory: counts of tokens, sorted logits, log probabilities.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
#: Tokens before those that decode: enough that attention divides them among as many programs as it ever does.
_CONTEXT = 4096


def largest_steps(
    slots: int, step_tokens: int, length: int, groups: int, block_size: int
) -> Iterator[tuple[int, StepPlan]]:
    """(KV blocks that it takes in each group, plan): a step of `step_tokens` of prompts, and one in which all decode.

    `length`: tokens of the longest sequence. All sequences of a step have the same blocks: what they say is nobody's.
    """
    rows = min(slots, step_tokens)
    share, more = divmod(min(step_tokens, rows * length), rows)
    context = min(length, _CONTEXT)
    for parts in ([(share + (i < more),) * 2 for i in range(rows)], [(context, 1)] * slots):
        blocks = -(-parts[0][0] // block_size)
        plan = StepPlan(num_tokens=sum(count for _, count in parts))
        for slot, (tokens, count) in enumerate(parts):
            sequence = nobodys(slot, tokens, _PARAMS, groups, block_size)
            plan.rows.append(ScheduledSeq(sequence, tokens - count, count, samples=True))
        yield blocks, plan


def nobodys(slot: int, tokens: int, params: SamplingParams, groups: int, block_size: int) -> Sequence:
    """A sequence of so many tokens, for steps that are run for their own sake. Its blocks in each of the KV groups are
    the first ones there are."""
    blocks = -(-tokens // block_size)
    return Sequence(
        request=Request(f"nobodys-{slot}", [0] * tokens, params),
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
    """Bytes on the model's CUDA device that a step takes at most, beside the weights and the KV cache.

    What decodes take counts twice: their recordings keep memory of their own. Raises EngineError where there is not
    even enough for a single step.
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
