"""The judge of leaks: what goes on growing is called a leak, what jumps, rises once or levels off is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.fuzz.growth import judge

MIB = float(1 << 20)
#: 20 minutes, a sample each 20 s.
TIMES = [20.0 * k for k in range(61)]
Series = Callable[[float, random.Random], float]


def series(value: Series, start: int) -> list[tuple[float, float]]:
    rng = random.Random(start)
    return [(at, value(at, rng)) for at in TIMES]


SOUND: dict[str, Series] = {
    "constant": lambda at, rng: 300 * MIB,
    "noisy": lambda at, rng: 300 * MIB + rng.gauss(0, 3 * MIB),
    "rises in the warm-up": lambda at, rng: 300 * MIB + min(at, 400) * MIB / 10 + rng.gauss(0, MIB),
    "levels off": lambda at, rng: 300 * MIB - 80 * MIB * math.exp(-at / 200) + rng.gauss(0, MIB),
    "a saw": lambda at, rng: 300 * MIB + (at % 300) * MIB / 20 + rng.gauss(0, MIB / 2),
    "jumps once, late": lambda at, rng: 300 * MIB + (15 * MIB if at > 900 else 0) + rng.gauss(0, MIB / 4),
    "falls": lambda at, rng: 300 * MIB - at * MIB / 50 + rng.gauss(0, MIB),
    "one wild sample": lambda at, rng: 300 * MIB + (500 * MIB if at == 1100 else 0) + rng.gauss(0, MIB / 2),
    "creeps, within what is allowed": lambda at, rng: 300 * MIB + at * MIB / 1200 + rng.gauss(0, MIB / 10),
}
LEAKS: dict[str, Series] = {
    "steady": lambda at, rng: 300 * MIB + at * MIB / 60,
    "under noise": lambda at, rng: 300 * MIB + at * MIB / 30 + rng.gauss(0, 3 * MIB),
    "in steps": lambda at, rng: 300 * MIB + at // 120 * 3 * MIB + rng.gauss(0, MIB / 2),
    "under a saw": lambda at, rng: 300 * MIB + at * MIB / 20 + (at % 100) * MIB / 20,
    "faster and faster": lambda at, rng: 300 * MIB + (at / 1200) ** 2 * 60 * MIB + rng.gauss(0, MIB),
    "after a warm-up": lambda at, rng: 300 * MIB + min(at, 300) * MIB / 5 + at * MIB / 40 + rng.gauss(0, MIB),
}


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("name", SOUND)
def test_what_does_not_go_on_is_no_leak(name: str, start: int) -> None:
    found = judge(series(SOUND[name], start), allowed=4 * MIB)
    assert not found.leaks, found


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("name", LEAKS)
def test_what_goes_on_growing_is_a_leak(name: str, start: int) -> None:
    found = judge(series(LEAKS[name], start), allowed=4 * MIB)
    assert found.leaks, found


def test_small_counts_leak_too() -> None:
    """A file every two minutes."""
    samples = [(at, 30.0 + at // 120) for at in TIMES]
    assert judge(samples, allowed=2).leaks
    assert judge(samples, allowed=2).an_hour == pytest.approx(30, rel=0.1)
    assert not judge([(at, 30.0 + random.Random(at).randint(0, 2)) for at in TIMES], allowed=2).leaks


def test_noise_alone_is_hardly_ever_called_a_leak() -> None:
    rng = random.Random(7)
    runs = [judge([(at, rng.gauss(0, 1)) for at in TIMES], allowed=0.5).leaks for _ in range(300)]
    assert sum(runs) <= 3


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="it takes 8"):
        judge([(float(k), 1.0) for k in range(9)], allowed=1)
