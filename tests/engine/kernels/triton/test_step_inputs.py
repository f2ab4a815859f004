"""The kernel makes the same inputs as plain torch, of the same rows."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

pytest.importorskip("triton")

from engine.execution.device.inputs import InputMaker, Shape, Targets, make_inputs, make_inputs_by_kernel, shape_of
from engine.execution.device.rows import DeviceRows
from engine.kv import KvSpace
from engine.plan import StepPlan
from tests.engine.execution.device.test_inputs import BLOCK, SLOTS, SWITCH, WINDOWS, row


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_does_what_torch_does(where: torch.device, seed: int) -> None:
    dice = random.Random(seed)
    rows = DeviceRows(
        [KvSpace(200, window) for window in WINDOWS], slots=SLOTS, block_size=BLOCK, length=800, device=where
    )
    rows.last_tokens.copy_(torch.arange(SLOTS) + 9000)
    maker = InputMaker(rows, most_tokens=700, device=where, rope_switch=SWITCH)
    # Decodes alone, padded; short chunks; chunks longer than a tile.
    longest = [1, 10, 400][seed % 3]
    plan = []
    for slot in dice.sample(range(SLOTS), dice.randint(1, SLOTS - 1)):
        count = dice.randint(1, longest) if sum(one.count for one in plan) < 200 else 1
        start = dice.randint(0, 300)
        first = max(0, start - 8) // BLOCK
        plan.append(row(slot, start, count, start + count, first=first, pending=dice.random() < 0.5))
    shape = shape_of(StepPlan(plan, num_tokens=sum(one.count for one in plan)), WINDOWS, BLOCK)
    if shape.decodes:
        shape = Shape(SLOTS, SLOTS, 1, shape.most_places)
    maker.send(maker.numbers(plan, shape))
    made = [getattr(maker.targets, field.name) for field in fields(Targets)]
    found = []
    for make in (make_inputs, make_inputs_by_kernel):
        for tensor in made[1:]:
            tensor.fill_(1)
        make(shape, maker.targets, rows)
        found.append([tensor.clone() for tensor in made])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
