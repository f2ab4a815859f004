"""Timers around an engine's parts find them all, add up, and change nothing of what it says."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.bench.breakdown import Meter, kind, shown
from engine.kernels import Kernels, select
from engine.kernels.native import load_library
from engine.models import Model, load_model
from engine.plan import ScheduledSeq, StepPlan
from tests.engine.stepping import request, scheduler, step

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 200, 31], [7, 7, 90, 14, 3, 250, 11]]
KERNELS = {"linear", "attention", "norm", "rope and cache", "gate"}
HOST = {"loop", "plan", "launch", "upload", "forward, rest", "logits", "sample", "collect", "enter", "publish"}


def timed(meter: Meter, device: torch.device, name: str, dtype: torch.dtype) -> Kernels:
    return meter.kernels(select(device, dtype, name))


@pytest.mark.parametrize(("name", "more"), [("reference", set()), ("ragged", {"inputs", "replay"})])
def test_every_part_is_found_and_the_tokens_are_the_same(
    model_folder: Path, device: torch.device, name: str, more: set[str]
) -> None:
    config = EngineConfig(device=device.type, kernels=name, kv_cache_bytes=1 << 20, max_num_seqs=4)
    with Engine.load(model_folder, config) as plain:
        expected = [one.token_ids for one in plain.generate(PROMPTS, PARAMS)]
    meter = Meter()
    model = load_model(model_folder, "auto", device, partial(timed, meter, device, name))
    with Engine(model, config, folder=model_folder, version="") as engine:
        meter.watch(engine)
        assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
    report = meter.report()
    assert set(report) == {"decode", "prefill"}
    assert report["decode"]["steps"] >= 5
    for found in report.values():
        assert sum(found["parts_ms"].values()) == pytest.approx(found["ms"])
        # Nor is any part told as all of a step, which is what is around the others.
        assert all(0 <= took < found["ms"] for took in found["parts_ms"].values())
    # What asks the device for lengths is not recorded there: nothing is replayed.
    more = more if device.type == "cpu" else more - {"replay"}
    assert set(report["decode"]["parts_ms"]) >= HOST | KERNELS | more
    assert "a, decode:" in shown("a", report)


def native_model(folder: Path, meter: Meter) -> Model:
    return load_model(folder, "auto", torch.device("cpu"), partial(timed, meter, torch.device("cpu"), "native"))


@pytest.mark.skipif(load_library() is None, reason="the native kernels are not built for this CPU")
def test_layers_that_run_in_one_call_tell_by_themselves_where_their_time_goes(model_folder: Path) -> None:
    config = EngineConfig(device="cpu", kernels="native", threads=1, kv_cache_bytes=1 << 20, max_num_seqs=4)
    with Engine.load(model_folder, config) as plain:
        expected = [one.token_ids for one in plain.generate(PROMPTS, PARAMS)]
    meter = Meter()
    model = native_model(model_folder, meter)
    assert model._together is not None
    with Engine(model, config, folder=model_folder, version="") as engine:
        meter.watch(engine)
        assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
    for found in meter.report().values():
        parts = found["parts_ms"]
        assert sum(parts.values()) == pytest.approx(found["ms"])
        assert all(parts[name] > 0 for name in KERNELS)
        # Time that is told twice would be missing from what is around it.
        assert parts["forward, rest"] > 0


def test_what_was_timed_elsewhere_is_taken_from_the_part_around_it() -> None:
    meter = Meter()
    before = time.perf_counter()
    with meter.part("outer"):
        began = time.perf_counter()
        meter.note_time("inner", 0.01)
        meter.note_time("inner", 0.002)
        least = time.perf_counter() - began
    most = time.perf_counter() - before
    assert meter._now["inner"] == pytest.approx(0.012)
    assert least <= meter._now["outer"] + 0.012 <= most


def test_a_part_s_time_excludes_the_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter()
    with meter.part("outer"):
        with meter.part("inner"):
            pass
        with meter.part("inner"):
            pass
    assert meter._now == {"outer": 31 - 2 - 8, "inner": 2 + 8}


def test_a_step_is_of_the_kind_of_what_it_computes() -> None:
    scheduled = scheduler()
    scheduled.add(request("a", [1, 2, 3]))
    sequence = step(scheduled)[0].rows[0].seq
    plain, guessing = (
        ScheduledSeq(sequence, 3, 1, samples=True),
        ScheduledSeq(sequence, 3, 1, samples=True, max_draft=2),
    )
    drafts = StepPlan([plain, guessing])
    drafts.guess(guessing, (8, 9))
    chunk = ScheduledSeq(sequence, 0, 2, samples=False)
    assert [kind(StepPlan(rows)) for rows in ([plain], [plain, guessing], [plain, guessing, chunk], [chunk])] == [
        "decode",
        "verify",
        "prefill",
        "prefill",
    ]


@pytest.mark.cuda
def test_the_devices_own_times_are_found(model_folder: Path) -> None:
    device = torch.device("cuda")
    meter = Meter(device)
    model = load_model(model_folder, "auto", device, partial(timed, meter, device, "auto"))
    config = EngineConfig(device="cuda", kv_cache_bytes=1 << 20, max_num_seqs=4, graphs=False, overlap=0)
    with Engine(model, config, folder=model_folder, version="") as engine:
        meter.watch(engine)
        engine.generate(PROMPTS, PARAMS)
    report = meter.report()
    assert set(report["decode"]["parts_ms"]) >= KERNELS | {"logits", "sample"}
    # Far less than what the device was held up for.
    assert 0 < report["decode"]["ms"] < 20
