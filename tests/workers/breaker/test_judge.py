"""Who is an outlier among its peers, and who is not: load, chance and a bad day of all are no reasons."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import StepWork
from workers import breaker
from workers.breaker import SLICE_S, Figures, Window, judge, slowness

COST = st.floats(0.0, 0.01)


def run(loads: list[tuple[int, int]], cost: tuple[float, float, float], times: float = 1.0) -> Figures:
    """A worker's figures after a minute of decode steps of these sizes (sequences, KV tokens each)."""
    now = [0.0]
    window = Window("m", lambda: now[0])
    fixed, token, kv = cost
    for k in range(breaker.SLICES * len(loads)):
        n, length = loads[k % len(loads)]
        window.on_step(StepWork(0.0, times * (fixed + token * n + kv * n * length), n, 0, n, n, n * length))
        if k % len(loads) == len(loads) - 1:
            now[0] += SLICE_S
    return window.figures(steps=1)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4000)), min_size=1, max_size=20), min_size=3),
    st.tuples(COST, COST, st.floats(0.0, 1e-5)),
)
def test_no_load_makes_a_slow_worker(loads: list[list[tuple[int, int]]], cost: tuple[float, float, float]) -> None:
    """Equal machines, whatever each of them computes. A machine of which all are slow is an equal one, too."""
    workers = [run(one, cost) for one in loads]
    for k, mine in enumerate(workers):
        found = slowness(mine, workers[:k] + workers[k + 1 :])
        assert found is None or found.ratio < 2.01
        assert not judge(mine, workers[:k] + workers[k + 1 :])


LOAD = [(1, 100), (8, 300), (30, 700)]
COSTS = (0.01, 0.001, 1e-7)


def test_a_slow_worker_is_seen_among_two() -> None:
    well = [run(LOAD, COSTS), run(LOAD, COSTS, 1.5)]
    assert "4.0 times as long" in judge(run(LOAD, COSTS, 5.0), well)
    assert not judge(run(LOAD, COSTS, 2.0), well)
    assert not judge(run(LOAD, COSTS, 5.0), well[:1]), "of two workers nobody can say which one is right"
    assert not judge(run(LOAD, (1e-5, 1e-6, 0.0), 50.0), [run(LOAD, (1e-5, 1e-6, 0.0))] * 2), "nobody would feel it"
    other = [Figures("another machine", steps=one.steps) for one in well]
    assert not judge(run(LOAD, COSTS, 5.0), other)


def test_steps_of_other_sizes_are_bounds() -> None:
    """A larger step takes no less, one of twice the size at most twice as long."""
    peers = [run([(30, 700)], COSTS)] * 2
    short, busy = slowness(run([(1, 20)], COSTS, 20.0), peers), slowness(run([(60, 900)], COSTS, 20.0), peers)
    assert short is not None
    assert busy is not None
    assert short.far
    assert busy.far
    assert not judge(run([(60, 900)], COSTS, 3.0), peers), "with so many at once, it may be the load"


@pytest.mark.parametrize(
    ("mine", "peers", "far"),
    [
        ((10, 9), [(10, 0), (10, 0)], True),
        ((40, 20), [(40, 2), (40, 0)], True),
        ((9, 9), [(10, 0), (10, 0)], False),  # too few of its own
        ((10, 9), [(20, 0)], False),  # too few peers
        ((10, 4), [(10, 0), (10, 0)], False),  # may be chance
        ((40, 20), [(40, 18), (40, 16)], False),  # the requests' fault
        ((40, 40), [(40, 40), (40, 40)], False),
    ],
)
def test_failures(mine: tuple[int, int], peers: list[tuple[int, int]], far: bool) -> None:
    said = judge(Figures("m", *mine), [Figures("m", *peer) for peer in peers])
    assert bool(said) == far, said


def test_bad_requests_alone_make_no_outlier() -> None:
    """A tenth to all of the requests fail wherever they run; chance gives some workers more of them."""
    chance, outliers = random.Random(1), 0
    for _ in range(2000):
        bad, ended = chance.uniform(0.1, 1.0), chance.randrange(10, 60)
        pool = [Figures("m", ended, sum(chance.random() < bad for _ in range(ended))) for _ in range(3)]
        outliers += any(judge(one, pool[:k] + pool[k + 1 :]) for k, one in enumerate(pool))
    assert outliers <= 1


def test_one_hiccup_is_none_of_the_figures() -> None:
    now = [0.0]
    window = Window("m", lambda: now[0])
    for k in range(4 * 20):
        window.on_step(StepWork(0.0, 5.0 if k == 30 else 0.02, 4, 0, 4, 4, 100))
        now[0] += SLICE_S / 20
    assert window.figures().steps == {(3, 7): (80, pytest.approx(0.02))}
    now[0] += breaker.SLICES * SLICE_S
    assert window.figures().steps == {}


def test_figures_are_read_as_they_were_said() -> None:
    said = run(LOAD, COSTS).to_dict()
    assert Figures.of(said).to_dict() == said
    for nonsense in (
        None,
        3,
        {"steps": {"9" * 5000 + ",1": [1, 1.0]}},
        {"steps": 3},
        {"steps": {"a": 1, "1,2": [1], "3,4": [float("nan"), 2]}, "ended": "x"},
    ):
        assert Figures.of(nonsense) == Figures()
