"""Buffers on their way: none is filled again before its copy has ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.device.inputs import PinnedRing


class LateCopies:
    """A device that is behind: a copy reads its source only when somebody waits for it, or at the very end."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def __call__(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        copy = (target, source)
        self.waiting.append(copy)

        def wait() -> None:
            # Copies of one stream happen in order.
            while any(copy is one for one in self.waiting):
                first = self.waiting.pop(0)
                first[0].copy_(first[1])

        return wait


@pytest.mark.parametrize("sizes", [[5] * 20, [1, 900, 3, 5, 4000, 2, 2, 2, 9000, 1]])
def test_copies_that_come_late_carry_what_was_sent(sizes: list[int]) -> None:
    late = LateCopies()
    ring = PinnedRing(torch.device("cpu"), late)
    targets = [torch.full((size,), -1, dtype=torch.int32) for size in sizes]
    for i, target in enumerate(targets):
        ring.lend(len(target))[:] = i
        ring.send(len(target), target)
    assert len(late.waiting) == 3  # as many as there are buffers were never waited for
    for target, source in late.waiting:
        target.copy_(source)
    assert [sorted(set(target.tolist())) for target in targets] == [[i] for i in range(len(sizes))]


def test_only_what_was_lent_is_sent() -> None:
    ring = PinnedRing(torch.device("cpu"))
    target = torch.zeros(8, dtype=torch.int32)
    ring.lend(3)[:] = [1, 2, 3]
    ring.send(3, target)
    assert target.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.cuda
def test_a_device_that_is_behind_gets_every_step_as_it_was_sent() -> None:
    cuda = torch.device("cuda")
    ring = PinnedRing(cuda)
    target = torch.zeros(1 << 16, dtype=torch.int32, device=cuda)
    seen = []
    for i in range(200):
        if i % 10 == 0:
            torch.cuda._sleep(3_000_000)
        lent = ring.lend(1 << 16)
        lent[:] = np.arange(1 << 16) + i
        ring.send(1 << 16, target)
        seen.append(target.clone())
    expected = torch.arange(1 << 16, dtype=torch.int32)
    assert all(torch.equal(one.cpu(), expected + i) for i, one in enumerate(seen))
