"""Breadth first through every state of a scenario, then backwards from the good ends."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from tests.protocol.model.canon import canon
from tests.protocol.model.checks import describe, good, wrong
from tests.protocol.model.rules import ALL
from tests.protocol.model.scripts import Rules
from tests.protocol.model.state import Cfg, State
from tests.protocol.model.world import start, steps


class Verdict(NamedTuple):
    """`says` is empty where every invariant holds; else what broke, with a shortest `trace` that leads there."""

    says: str
    trace: list[str]
    states: int


def explore(cfg: Cfg, rules: Rules = ALL, limit: int = 4_000_000) -> Verdict:
    first = canon(start(cfg), cfg)
    index: dict[State, int] = {first: 0}
    order, parent, via = [first], array("l", [-1]), [""]
    src, dst = array("l"), array("l")  # the fair steps

    def trace(i: int) -> list[str]:
        out: list[str] = []
        while i > 0:
            out.append(via[i])
            i = parent[i]
        return out[::-1]

    n = 0
    while n < len(order):
        s = order[n]
        for label, fair, after in steps(s, cfg, rules):
            after = canon(after, cfg)
            j = index.get(after)
            if j is None:
                if len(order) >= limit:
                    return Verdict(f"more than {limit} states", [], len(order))
                j = index[after] = len(order)
                order.append(after)
                parent.append(n)
                via.append(label)
                if bad := wrong(after, cfg):
                    return Verdict(bad, trace(j), len(order))
            if fair and j != n:
                src.append(n)
                dst.append(j)
        n += 1
    stuck = _stuck(order, src, dst, cfg)
    if stuck is not None:
        return Verdict("S5 no fair path to a settled end", [*trace(stuck), describe(order[stuck])], len(order))
    return Verdict("", [], len(order))


def _stuck(order: list[State], src: array[int], dst: array[int], cfg: Cfg) -> int | None:
    """The first state from which no good end can be reached by fair steps."""
    into: list[list[int]] = [[] for _ in order]
    for a, b in zip(src, dst, strict=True):
        into[b].append(a)
    fine = bytearray(len(order))
    todo = [i for i, s in enumerate(order) if good(s, cfg)]
    while todo:
        i = todo.pop()
        if not fine[i]:
            fine[i] = 1
            todo.extend(into[i])
    i = fine.find(0)
    return i if i >= 0 else None
