"""`penstock plan` and what it computes by: against figures of real GPUs, a real engine's memory, and by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from safetensors.torch import load_file

from engine.memory import block_bytes
from engine.models import load_model, size_of
from engine.roofline import GPUS
from infra.gpu.shapes import SHAPES
from producers.contract import keys
from producers.contract.profile import Profile
from tests.engine.random_models import BASE, FAMILIES, VARIANTS, tensors, write_model
from tests.processes import ROOT
from tests.workers.cli.conftest import Run
from workers.library.reference import bundled
from workers.trials.plan import Load, Margins, Need, Rates, break_even, needed, rates_of, rates_on
from workers.trials.simulate.simulation import WorkerModel
from workers.trials.simulate.traces import Arrival

BY_NAME = {gpu.name: gpu for gpu in GPUS}


def need_of(shape: str, folder: Path, **more: Any) -> Need:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return Need.of(size_of(folder), **more)


def rates(need: Need, gpu: str, load: Load, sequences: int) -> Rates:
    return rates_on(BY_NAME[gpu], need, load, sequences, 60.0)


#: Measured on an H200 and an H100 (docs/notes/gpu-limits.md): GPU, shape, weights, sequences, milliseconds of a step at
#: a context of 1,024, and by how much the estimate may be off.
STEPS = [
    ("H200", "llama-8b", "auto", 1, 4.05, 0.12),
    ("H200", "llama-8b", "auto", 16, 5.16, 0.05),
    ("H200", "llama-8b", "auto", 64, 7.17, 0.05),
    ("H200", "llama-8b", "auto", 256, 15.8, 0.07),
    ("H100", "llama-8b", "auto", 1, 5.48, 0.16),
    ("H100", "llama-8b", "auto", 256, 19.3, 0.12),
    ("H200", "llama-8b", "fp8", 1, 3.73, 0.15),
    ("H200", "llama-8b", "fp8", 64, 6.61, 0.15),
    ("H200", "llama-1b", "auto", 1, 1.23, 0.08),
    ("H200", "llama-1b", "auto", 64, 2.72, 0.08),
    ("H200", "llama-1b", "auto", 256, 6.95, 0.05),
]


@pytest.mark.parametrize(("gpu", "shape", "weights", "sequences", "ms", "off"), STEPS)
def test_a_step_takes_what_was_measured(
    gpu: str, shape: str, weights: str, sequences: int, ms: float, off: float, tmp_path: Path
) -> None:
    need = need_of(shape, tmp_path, weights=weights)
    assert rates(need, gpu, Load(1023, 2), sequences).step_s * 1e3 == pytest.approx(ms, rel=off)


@pytest.mark.parametrize(
    ("gpu", "load", "tokens_per_s"),
    [("H200", Load(1000, 1000), 10_000), ("H200", Load(1000, 250), 6_110), ("H100", Load(1000, 250), 5_610)],
)
def test_throughput_is_what_was_measured(gpu: str, load: Load, tokens_per_s: float, tmp_path: Path) -> None:
    made = rates(need_of("llama-8b", tmp_path), gpu, load, 256)
    assert made.output_tokens_per_s == pytest.approx(tokens_per_s, rel=0.08)
    assert made.prefill_tokens_per_s == pytest.approx(43_600, rel=0.03)


@pytest.mark.parametrize("name", ["biases", "qwen3", "mixtral", "qwen3-moe", "phi3", "gemma3"])
def test_all_weights_of_a_checkpoint_are_counted(name: str, tmp_path: Path) -> None:
    changes = (VARIANTS | FAMILIES)[name]
    size, made = size_of(write_model(tmp_path / name, **changes)), tensors(BASE | changes)
    assert size.elements == sum(tensor.numel() for tensor in made.values())
    work, untied = Need.of(size).work, "lm_head.weight" in made
    matrices = [
        tensor.numel() for name, tensor in made.items() if tensor.ndim == 2 and not (untied and "embed_tokens" in name)
    ]
    assert work.layers + work.experts + work.head == sum(matrices)


def test_a_config_that_asks_for_too_many_experts_is_refused_before_they_are_made(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", **FAMILIES["qwen3-moe"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4096, "num_experts": 4096}))
    ran = run("plan", str(folder))
    assert (ran.status, ran.out) == (2, "")
    assert "asks for 16777216 experts in all layers; at most 65536 are read" in ran.err


def test_a_real_engine_takes_the_memory_that_was_planned() -> None:
    folder = bundled()["tiny"]
    size, block = size_of(folder), 16
    model = load_model(folder, "auto", torch.device("cpu"))
    need = Need.of(size)
    assert need.weight_bytes == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert model.kernels.weights == need.work.layers + need.work.head
    width = model.kernels.cache_dtype.itemsize
    kept = sum(block_bytes(group, block, width) for group in model.kv_groups)
    assert need.work.kv_bytes_of(block) / size.dtype.itemsize == kept / width


def test_room_is_what_is_left_below_the_line(tmp_path: Path) -> None:
    need, load, margins = need_of("llama-8b", tmp_path), Load(1000, 250), Margins()
    for gpu in GPUS:
        room = need.room(gpu, load, margins)
        assert not room or need.total(room, load, margins) <= 0.85 * gpu.memory_bytes
        assert need.total(room + 1, load, margins) > 0.85 * gpu.memory_bytes


def test_a_profile_tells_what_a_worker_does() -> None:
    made = rates_of(Profile(knee=4.2, tokens_per_s=500.0, cold_start={"total": 3.0}), Load(100, 25))
    assert (made.tasks_per_s, made.output_tokens_per_s, made.worker.cold_start) == (4.0, 100.0, 3.0)
    assert made.tpot_s == pytest.approx(4 / 100)
    with pytest.raises(ValueError, match="have not measured"):
        rates_of(Profile(knee=4.0), Load(100, 25))


def test_the_fewest_workers_are_chosen_that_keep_the_wait() -> None:
    """A worker takes 10 s for a task, one at a time; one comes each 4 s: 2.5 workers' work."""
    model = WorkerModel(knee=1, tokens_per_s=10.0, slots=1, prompt_cost=0.0, cold_start=0.0)
    arrivals = [Arrival(4.0 * number, 1, 0, 100) for number in range(60)]
    fleet, holds = needed(arrivals, model, 1.0, 20)
    assert (fleet.workers, holds) == (3, True)
    assert fleet.wait_p95_s == pytest.approx(0.1)
    assert needed(arrivals, model, 1.0, 2)[1] is False
    assert needed(arrivals, model, 60.0, 20)[0].workers < 3, "who may wait needs fewer"
    together = [Arrival(0.0, 1, 0, 100)] * 10
    assert needed(together, model, 100.0, 20)[0].workers == 1


def test_break_even_follows_the_share_of_time_that_a_worker_is_up() -> None:
    even = break_even(start_s=60.0, task_s=10.0, cool_down=300.0, price_ratio=0.6)
    assert even.cheaper_below is not None
    rate = even.cheaper_below / 3600
    up = 60 + 10 + (math.exp(rate * 300) - 1) / rate
    assert up / (up + 1 / rate) == pytest.approx(0.6)
    assert break_even(60.0, 10.0, 300.0, 1.0).cheaper_below is None
    assert break_even(6.0, 10.0, 300.0, 0.6).cold_below < even.cold_below, "a short start is met by fewer"


def test_a_plan_in_words_and_as_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-8b"]))
    asked = ("plan", str(tmp_path), "--gpu", "h200", "--gpu", "L4", "--price", "4", "--rate", "2")
    ran = run(*asked, "--reserved-price", "2")
    assert (ran.status, ran.err) == (0, "")
    assert "8,030,261,248 weights in bfloat16, 16.1 GB; KV cache 131,072 bytes a token" in ran.out
    assert "takes 2" in ran.out
    assert re.search(r"H200: below [\d.,]+ tasks an hour, scale-to-zero costs less than one worker that is", ran.out)
    report = json.loads(run(*asked, "--json").out)
    h200 = report["gpus"][0]
    rate = h200["rates"]["output_tokens_per_s"]
    assert h200["per_1000_output_tokens"] == pytest.approx(4 / 3600 / rate * 1000)
    (row,) = report["load"]["workers"]
    assert row["holds"]
    assert row["always_up"]["cost"] == pytest.approx(4 * row["always_up"]["worker_hours"])


def test_a_model_larger_than_a_gpu_says_how_many_it_takes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-70b"]))
    asked = ["plan", str(tmp_path), "--gpu", "H100", "--gpu", "L4"]
    report = {row["gpu"]: row for row in json.loads(run(*asked, "--json").out)["gpus"]}
    assert [report[name]["ranks"] for name in ("H100", "L4")] == [4, 16]
    four, eight = report["H100"]["divided"]
    assert (four["ranks"], eight["ranks"]) == (4, 8)
    # By hand: 141 GB less the embedding, read by four at 3.0 TB/s, at 0.8 of the roofline; 160 sums of at least 10 us.
    assert four["step_s"]["1"] == pytest.approx((139e9 / 4 / 3.0e12 + 160 * 10e-6) / 0.8, rel=0.01)
    assert four["step_s"]["1"] / 2 < eight["step_s"]["1"] < four["step_s"]["1"]
    text = run(*asked).out
    assert "takes 4" in text
    assert re.search(r"estimates; no GPU has run it.*\n.*\n4 x H100 ", text)


def test_more_gpus_than_kv_heads_hold_each_key_and_value_several_times(tmp_path: Path) -> None:
    load, margins = Load(1000, 250), Margins()
    needs = []
    for kv_heads in (1, 8):
        config = SHAPES["llama-8b"] | {"num_key_value_heads": kv_heads}
        (tmp_path / "config.json").write_text(json.dumps(config))
        needs.append(Need.of(size_of(tmp_path)))
    one, eight = needs
    l4 = BY_NAME["L4"]
    assert one.room(l4, load, margins, 2) == pytest.approx(4 * eight.room(l4, load, margins, 2), rel=0.2)
    assert one.room(l4, load, margins, 8) == pytest.approx(eight.room(l4, load, margins, 8), rel=0.05)
    assert [need.work.kv_copies(8) for need in needs] == [8, 1]
    steps = [need.work.step_of_ranks_s(l4, 8, 64, 4096) for need in needs]
    assert steps[0] == pytest.approx(steps[1], rel=0.05), "each GPU reads the keys and values of one head"


def test_a_gpu_without_fp8_is_not_said_to_hold_a_model_in_fp8(run: Run, tmp_path: Path) -> None:
    for shape in ("llama-8b", "llama-70b"):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
        ran = run("plan", str(tmp_path), "--gpu", "A100 80GB", "--weights", "fp8", "--rate", "2")
        assert re.search(r"A100 80GB .* no fp8 ", ran.out), ran.out
        assert " x A100" not in ran.out
        assert ran.out.endswith("tasks: no workers are planned for them, as none of these GPUs serves the model.\n")


def test_a_plan_by_what_real_workers_measured(run: Run, valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    valkey.hset(keys.PROFILES, "tiny@v1", json.dumps({"knee": 4, "tokens_per_s": 500, "cold_start": {"total": 2.5}}))
    trace = tmp_path / "trace.csv"
    trace.write_text("time,tier,prompt_tokens,output_tokens\n" + "".join(f"{k},default,100,25\n" for k in range(60)))
    asked = ("plan", "tiny", "--prompt-tokens", "100", "--output-tokens", "25", "--profile", "tiny@v1")
    said = json.loads(run(*asked, "--trace", str(trace), "--price", "1", "--broker", valkey_url, "--json").out)
    assert (said["gpus"], said["profile"]["rates"]["tasks_per_s"]) == ([], 4.0)
    assert said["load"]["workers"][0]["always_up"]["workers"] == 1
    ran = run(*asked[:-1], "tiny@v2", "--broker", valkey_url)
    assert (ran.status, "no profile of 'tiny@v2' is kept" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--gpu", "H300"], "--gpu is 'H300'; the table has"),
        (["--price", "nan"], "--price is 'nan'; it must be a number from 0 on"),
        (["--price", "H300=2"], "--price names 'H300'; there are"),
        (["--price", "tiny@v9=2"], "--price names 'tiny@v9'; there are"),
        (["--cool-down", "0", "--rate", "2", "--gpu", "L4"], "Invalid value for '--cool-down'"),
        (["--weights", "int3"], "--weights is 'int3'; it must be one of auto, fp8, int8, int4"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype is 'int3'"),
        (["--rate", "2"], "say with --gpu NAME or --profile MODEL@VERSION"),
        (["--rate", "2", "--trace", "x.csv"], "give one of --rate and --trace"),
        (["--prompt-tokens", "100000000"], "are more than the model's context of"),
    ],
)
def test_bad_input_is_refused_by_name(run: Run, more: list[str], why: str) -> None:
    ran = run("plan", "tiny", *more)
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err


def test_a_model_of_a_few_tokens_of_context_has_a_plan(run: Run, tmp_path: Path) -> None:
    for context, status in ((2, 0), (1, 2)):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-1b"] | {"max_position_embeddings": context}))
        ran = run("plan", str(tmp_path), "--gpu", "L4")
        assert (ran.status, "are more than the model's context of 1 tokens" in ran.err) == (status, context == 1)


def test_the_page_has_the_table_of_gpus() -> None:
    page = (ROOT / "docs" / "run" / "plan.md").read_text("utf-8")
    for gpu in GPUS:
        fp8 = "none" if gpu.fp8_tflops is None else f"{gpu.fp8_tflops:g}"
        cells = (gpu.name, f"{gpu.memory_gb:g}", f"{gpu.tb_per_s:g}", f"{gpu.tflops:g}, {fp8}", gpu.source)
        assert f"| {' | '.join(cells)} |" in page
