"""Runs dummy steps before a model is served: to measure their memory, and so that no served step has to compile a
kernel.

`step_bytes` measures the memory of the largest steps, beside weights and KV cache.

`rehearse` launches prompts, decodes and all ways to choose tokens on the runner that will serve, and lets it record its
decode steps. `penstock warm` (execution/warm.py) does the same on a runner of the device "meta". Nothing reads what
these steps write into the KV cache and the rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from engine.adapters import Adapter
from engine.errors import EngineError, ErrorText
from engine.execution.device.graphs import FEWEST_PLACES, batch_sizes
from engine.execution.device.runner import DeviceRunner
from engine.kv import KvSpace, Table, first_block
from engine.memory import release
from engine.models import Model
from engine.output import OutputState
from engine.params import SamplingParams, greedy
from engine.plan import ScheduledSeq, StepPlan
from engine.request import Request
from engine.sequence import Sequence

logger = logging.getLogger("penstock.engine")

#: Parameters for each combination of sampling features: none, filters, edits, both; then edits by biases.
_WAYS = (
    greedy(max_tokens=1),
    SamplingParams(top_p=0.9),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(top_p=0.9, repetition_penalty=1.1),
    SamplingParams(logit_bias=((1, 1.0),)),
)
#: The sizes of the prompt steps, in tokens.
PROMPTS = (7, 100, 512)
#: The context lengths to rehearse. Decodes are recorded for each factor of four, from 1024 on.
CONTEXTS = (64, 1024, 4096, 16384, 65536)

#: One sequence of a step: its tokens, how many of them are computed, and its sampling parameters.
_Row = tuple[int, int, SamplingParams]
#: Parameters that use all kinds of sampling memory: token counts, sorted logits, log probabilities.
_PARAMS = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=20)
#: The context of decode steps: long enough that attention divides it among as many programs as it ever does.
_CONTEXT = 4096


def step_bytes(
    model: Model,
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    length: int,
    make: type[DeviceRunner] = DeviceRunner,
) -> int:
    """The most bytes that a step takes on the model's CUDA device, beside the weights and the KV cache.

    `make`: the model's runner. The memory of decode steps counts twice, because their recordings keep memory of their
    own. Raises EngineError if
    there is not enough memory for a single step.
    """
    groups = len(model.kv_groups)
    plans = list(largest_steps(max_num_seqs, max_num_batched_tokens, length, groups, block_size))
    before = torch.cuda.memory_allocated(model.device)
    peaks = []
    try:
        runner = make(
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
            ErrorText.of(
                "the device has no memory for a step of {} tokens or of {} sequences; lower {max_num_batched_tokens} "
                "or {max_num_seqs}: {}",
                max_num_batched_tokens,
                max_num_seqs,
                error,
            )
        ) from error
    del runner
    torch.cuda.empty_cache()
    prompts, decodes = peaks
    logger.info("the largest steps take %.1f MiB of prompts, %.1f MiB of decodes", prompts / 2**20, decodes / 2**20)
    return max(prompts, decodes) + decodes


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


def rehearse(runner: DeviceRunner, longest: int = FEWEST_PLACES) -> None:
    """Record decode steps of contexts of up to `longest` tokens, most sequences first, then launch every other kind.

    No other step may be in flight. Raises what a step raises, except a lack of memory, which is only logged.
    """
    began = time.perf_counter()
    while runner.record_next(longest):
        pass
    count = 0
    for rows in _steps(runner.max_num_seqs, runner.max_num_batched_tokens, runner.longest):
        plan = _plan(rows, runner.spaces, runner.block_size)
        if plan is not None:
            count += _launched(runner, plan)
    if runner.tabled:
        adapter = dummy_adapter(runner.model)
        for tokens in (min(20, runner.longest, runner.max_num_batched_tokens), 1):
            plan = _plan([(min(20, runner.longest), tokens, _WAYS[0])], runner.spaces, runner.block_size)
            if plan is not None:
                plan.rows[0].seq.adapter = adapter
                count += _launched(runner, plan)
    runner.forget()
    recorded = 0 if runner.graphs is None else len(runner.graphs)
    seconds = time.perf_counter() - began
    logger.info("%d steps were rehearsed and %d decode steps recorded, in %.1f s", count, recorded, seconds)


def dummy_adapter(model: Model) -> Adapter:
    """An adapter of one rank that changes every product that adapters may change, by nothing."""
    kernels = model.kernels
    products = {}
    for prefix, linear in model.linears():
        if prefix and ".experts." not in prefix:
            ups, first = [], 0
            for part, outputs in enumerate(linear.parts.values()):
                up = torch.zeros(outputs, 1, dtype=kernels.weight_dtype, device=model.device)
                ups.append((slice(first, first + outputs), slice(part, part + 1), up))
                first += outputs
            down = torch.zeros(len(ups), linear.inputs, dtype=kernels.weight_dtype, device=model.device)
            products[linear] = kernels.prepare_low_rank(down, ups)
    return Adapter("", 1, products)


def _launched(runner: DeviceRunner, plan: StepPlan) -> bool:
    """Launch a plan. Returns False if there is no memory for it; in service such a step is made smaller
    (`pipeline.Shrink`)."""
    try:
        launched = runner.launch(plan)
        if runner.model.staged:  # which samples when it collects
            runner.collect(launched)
    except Exception as error:
        if not release(error):
            raise
        logger.warning("there is no memory to rehearse a step of %d tokens", plan.num_tokens)
        return False
    return True


def _plan(rows: list[_Row], spaces: tuple[KvSpace, ...], block_size: int) -> StepPlan | None:
    """The plan of these rows. None if a group has fewer blocks than one of the sequences needs."""
    plan = StepPlan(num_tokens=sum(count for _, count, _ in rows))
    for slot, (tokens, count, params) in enumerate(rows):
        sequence = dummy_sequence(slot, tokens, params, 0, block_size)
        sequence.tables = [_table(space, tokens, tokens - count, block_size) for space in spaces]
        if any(len(table.blocks) > space.num_blocks for table, space in zip(sequence.tables, spaces, strict=True)):
            return None
        plan.rows.append(ScheduledSeq(sequence, tokens - count, count, samples=True))
    return plan


def _table(space: KvSpace, tokens: int, computed: int, block_size: int) -> Table:
    """A table of the group's first blocks, as many as a sequence holds with `computed` of its `tokens` computed."""
    first = first_block(space.window, computed, block_size)
    return Table(list(range(-(-tokens // block_size) - first)), first)


def _steps(slots: int, step_tokens: int, longest: int) -> Iterator[list[_Row]]:
    """Yield the rows of each step, with no sequence longer than `longest`."""
    greedy = _WAYS[0]
    prompts = sorted({min(tokens, step_tokens, longest) for tokens in PROMPTS})
    for tokens in prompts:
        yield [(tokens, tokens, greedy)]
    # A prompt beside a decode.
    beside = min(20, longest, step_tokens - 1)
    if slots > 1 and beside:
        yield [(min(40, longest), 1, greedy), (min(40, longest), beside, greedy)]
    # Prompts and decodes after a cached context; attention splits a long one into parts.
    for context in (min(context, longest) for context in CONTEXTS):
        for tokens in prompts:
            yield [(context, min(tokens, context), greedy)]
        yield [(context, 1, greedy)]
    for params in _WAYS:
        yield [(min(20, longest), min(20, longest, step_tokens), params)]
        yield [(min(20, longest), 1, params)]
    for size in batch_sizes(slots):
        yield [(min(20, longest), 1, greedy)] * size
