"""What will be done to whom, and when: drawn from a seed, written down first, so that it can be done again.

draw(seed, ...) -> Plan -> plan.json -> (injector)          --replay plan.json -> the same Plan
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: whom it may befall, how long it lasts (s, from and to), how often it comes beside others."""

    roles: tuple[str, ...]
    seconds: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0


PROCESSES: Final = ("worker", "gateway", "sweeper", "client")
SERVERS: Final = ("broker", "store")

#: `seconds` are for a lease of 10 s; they are drawn in proportion to the lease.
KINDS: Final[Mapping[str, Kind]] = {
    # Processes: SIGKILL, and another takes its place; SIGSTOP, later SIGCONT; SIGTERM, and another takes its place.
    "kill": Kind((*PROCESSES,), weight=4.0),
    "pause": Kind((*PROCESSES, *SERVERS), (0.5, 16.0), weight=2.0),
    "drain": Kind(("worker", "gateway"), weight=1.0),
    # Servers: SIGKILL, started again after a while; what they write to disk fails; their clock is set.
    "restart": Kind(SERVERS, (0.2, 6.0)),
    "full": Kind(SERVERS, (0.5, 5.0)),
    "clock": Kind((*SERVERS, "worker"), (0.0, 0.0)),
    # Links, from one process to one server.
    "refuse": Kind(("link",), (0.5, 16.0)),
    "silence": Kind(("link",), (0.5, 16.0)),
    "deaf": Kind(("link",), (0.5, 16.0)),
    "mute": Kind(("link",), (0.5, 16.0)),
    "delay": Kind(("link",), (1.0, 10.0)),
    "cut": Kind(("link",), weight=2.0),
    # Deliveries: a message is there twice; those that wait change places.
    "double": Kind(("queues",), weight=1.0),
    "shuffle": Kind(("queues",), weight=0.5),
}

#: How kills are shared out between roles.
_SHARES: Final = {"worker": 6.0, "gateway": 2.0, "client": 2.0, "sweeper": 1.0}
#: A clock is set by one of these (s).
_JUMPS: Final = (-30.0, -3.0, 3.0, 30.0, 3600.0)
#: Part of all faults that come at the same instant as the one before.
_TOGETHER: Final = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """`at`, s after the load began; `target`, a process, server or link by name; `seconds` that it lasts.

    `amount`: of a clock, by how much it is set (s); of a delay, how long each piece waits (s); of a cut, after how many
    bytes of an answer.
    """

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: its load and its faults. `shape`: whatever else whoever runs it needs to do the same again."""

    seed: int
    seconds: float
    lease: float
    faults: tuple[Fault, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises ValueError where the file holds no plan."""
        try:
            raw = json.loads(path.read_text())
            faults = tuple(Fault(**one) for one in raw.pop("faults"))
            plan = cls(faults=faults, **raw)
            times = [plan.seconds, plan.lease]
            for fault in plan.faults:
                times += [fault.at, fault.seconds, fault.amount]
            if not all(map(math.isfinite, times)):
                raise TypeError("a time in it is not finite")
            return plan
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no plan: {error}") from error


#: Of a kind of fault: the names that can suffer it, by role.
Able = Callable[[str], Mapping[str, Sequence[str]]]


def by_role(targets: Mapping[str, Sequence[str]]) -> Able:
    """Where everybody can suffer what their role may."""
    return lambda kind: {role: targets.get(role, ()) for role in KINDS[kind].roles}


def draw(
    seed: int,
    seconds: float,
    able: Able,
    *,
    kinds: Sequence[str],
    lease: float,
    kills: int | None = None,
    pause: tuple[float, float] = (0.5, 8.0),
    shape: Mapping[str, Any] | None = None,
) -> Plan:
    """`kinds` of which faults are drawn; `pause`: bounds of the time between two instants with faults (s).

    With `kills`, so many processes are killed, however long that takes. Raises ValueError where nothing can suffer any
    of the kinds.
    """
    possible = [kind for kind in kinds if any(able(kind).values())]
    if not possible or (kills is not None and "kill" not in possible):
        raise ValueError(f"nothing here can suffer {', '.join(kinds) or 'anything'}")
    rng = random.Random(f"{seed} faults")  # noqa: S311 - it draws faults, it guards nothing
    faults: list[Fault] = []
    for at in _instants(rng, seconds, pause, endless=kills is not None):
        if kills is not None and sum(fault.kind == "kill" for fault in faults) >= kills:
            seconds = faults[-1].at + lease  # what the last one stopped is to go on under load
            break
        faults.append(_one(rng, at, able, possible, lease))
    return Plan(seed, seconds, lease, tuple(faults), dict(shape or {}))


def _instants(rng: random.Random, seconds: float, pause: tuple[float, float], *, endless: bool) -> Iterator[float]:
    at = rng.uniform(*pause)
    while endless or at < seconds:
        yield at
        if rng.random() >= _TOGETHER:
            at = round(at + rng.uniform(*pause), 3)


def _one(rng: random.Random, at: float, able: Able, kinds: Sequence[str], lease: float) -> Fault:
    (kind,) = rng.choices(kinds, [KINDS[kind].weight for kind in kinds])
    targets = {role: names for role, names in able(kind).items() if names}
    (role,) = rng.choices(list(targets), [_SHARES.get(role, 1.0) for role in targets])
    target = rng.choice(list(targets[role]))
    shortest, longest = KINDS[kind].seconds
    # Most are short, some outlast a lease.
    lasts = lease / 10 * (shortest + (longest - shortest) * rng.random() ** 2)
    amount = 0.0
    if kind == "clock":
        amount = rng.choice(_JUMPS)
    elif kind == "delay":
        amount = rng.uniform(0.01, 0.15)
    elif kind == "cut":
        amount = rng.choice((0, 1, rng.randint(2, 300)))
    return Fault(round(at, 3), kind, target, round(lasts, 3), round(amount, 3))
