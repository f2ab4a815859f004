"""The steps that are run to find out what a step takes are the largest there can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import EngineError
from engine.execution.device import DeviceRunner, step_bytes
from engine.execution.device.rehearsal import largest_steps
from engine.kernels.reference import Ragged
from engine.kv import KvSpace
from engine.models import load_model
from tests.engine.random_models import write_model


@pytest.mark.parametrize(
    ("slots", "step_tokens", "length", "rows", "tokens"),
    [
        (4, 64, 512, 4, 64),
        (8, 60, 512, 8, 60),
        (1, 100, 70, 1, 70),  # no sequence is longer
        (3, 3, 512, 3, 3),
    ],
)
def test_they_fill_a_step_and_every_row(slots: int, step_tokens: int, length: int, rows: int, tokens: int) -> None:
    (few, prompts), (many, decodes) = largest_steps(slots, step_tokens, length, 2, 16)
    assert (len(prompts.rows), prompts.num_tokens) == (rows, tokens)
    assert sum(row.count for row in prompts.rows) == tokens
    assert (len(decodes.rows), decodes.num_tokens) == (slots, slots)
    assert all(row.count == 1 and row.start == min(length, 4096) - 1 for row in decodes.rows)
    for blocks, plan in ((few, prompts), (many, decodes)):
        assert all(row.samples and row.start + row.count <= blocks * 16 for row in plan.rows)
        assert all(max(table.blocks) == blocks - 1 for row in plan.rows for table in row.seq.tables)


def test_they_run(model_folder: Path, device: torch.device) -> None:
    model = load_model(model_folder, "auto", device, Ragged)
    plans = list(largest_steps(5, 48, 200, 1, 16))
    runner = DeviceRunner(
        model,
        spaces=[KvSpace(max(blocks for blocks, _ in plans))],
        block_size=16,
        max_num_seqs=5,
        max_num_batched_tokens=48,
        max_model_len=200,
        graphs=False,
    )
    for _, plan in plans:
        found = runner.execute(plan)
        assert [one.error for one in found] == [None] * 5
        assert all(one.logprobs is not None and len(one.logprobs.top) == 20 for one in found)


@pytest.mark.cuda
def test_a_step_takes_more_the_larger_it_is_and_leaves_nothing_behind(model_folder: Path) -> None:
    model = load_model(model_folder, "auto", torch.device("cuda"), Ragged)
    settings = {"block_size": 16, "max_num_seqs": 8, "length": 512}
    step_bytes(model, max_num_batched_tokens=64, **settings)  # what libraries keep, they keep from here on
    before = torch.cuda.memory_allocated()
    small, large = (step_bytes(model, max_num_batched_tokens=tokens, **settings) for tokens in (64, 2048))
    assert 0 < small < large
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.cuda
def test_a_device_without_memory_for_a_step_says_what_to_do(model_folder: Path) -> None:
    model = load_model(model_folder, "auto", torch.device("cuda"), Ragged)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
        with pytest.raises(EngineError, match="lower max_num_batched_tokens or max_num_seqs"):
            step_bytes(model, block_size=16, max_num_seqs=64, max_num_batched_tokens=1 << 19, length=512)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_an_engine_with_less_memory_than_its_steps_want_makes_smaller_ones(tmp_path: Path) -> None:
    folder = write_model(tmp_path, hidden_size=512, intermediate_size=16384, vocab_size=320)
    config = EngineConfig(device="cuda", kernels="ragged", max_num_seqs=4, max_num_batched_tokens=8192)
    _, total = torch.cuda.mem_get_info()
    with Engine.load(folder, replace(config, kv_cache_bytes=32 << 20, max_model_len=512)) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        engine.generate([[7]], params)  # what libraries keep, they have from here on
        try:
            torch.cuda.empty_cache()
            # Gate and up of 16 tokens alone take 2 MiB.
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (48 << 20)) / total)
            found = engine.generate([[7 + i] * 500 for i in range(4)], params)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert [one.finish_reason for one in found] == ["length"] * 4
        assert engine.stats().shrinks > 0
