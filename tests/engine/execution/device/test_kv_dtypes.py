"""Keys and values of every dtype through the device's runner: what the plain runner says over the same dtype."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

pytest.importorskip("triton")

from engine.config import KvCacheDType
from engine.execution.device import DeviceRunner
from engine.execution.runner import Runner
from engine.kv import KvSpace
from engine.models import load_model
from engine.plan import StepPlan
from tests.engine.deterministic.logits import NATIVE
from tests.engine.execution.device.test_runner import BLOCK, PROMPT, SETTINGS, plan, scheduled, seq, told
from tests.engine.random_models import write_model
from tests.exhaustive import few

SPACES = [KvSpace(24)]


def history() -> list[StepPlan]:
    """Two prompts, one in chunks; a decode of both; one that goes on with a copy of the other's last block."""
    first, second = PROMPT, PROMPT[:3:-1]
    return [
        plan(scheduled(seq(0, first, [20, 3, 7]), 0, 6)),
        plan(scheduled(seq(0, first, [20, 3, 7]), 6, 5), scheduled(seq(1, second, [5, 9]), 0, 7)),
        plan(scheduled(seq(0, [*first, 6], [20, 3, 7]), 11, 1), scheduled(seq(1, [*second, 8], [5, 9]), 7, 1)),
        plan(scheduled(seq(2, [*first, 6, 4], [20, 3, 11, 12]), 12, 1), copies=[(0, 7, 11)]),
    ]


@NATIVE
@pytest.mark.parametrize("kind", few(get_args(KvCacheDType), "int8", "fp8"))
def test_the_device_says_what_the_plain_runner_says(tmp_path: Path, device: torch.device, kind: str) -> None:
    """Over two heads of keys; in Triton's interpreter where there is no GPU."""
    folder = write_model(tmp_path, num_hidden_layers=1)
    plain = load_model(folder, "float32", torch.device("cpu"), "native", kv_cache_dtype=kind)
    model = load_model(folder, "float32", device, "triton", kv_cache_dtype=kind)
    expected = Runner(plain, spaces=SPACES, block_size=BLOCK, max_num_seqs=4)
    found = DeviceRunner(model, spaces=SPACES, **SETTINGS)
    for ours, theirs in zip(history(), history(), strict=True):
        for one, other in zip(told(found.execute(ours)), told(expected.execute(theirs)), strict=True):
            assert one == pytest.approx(other, abs=1e-3)
