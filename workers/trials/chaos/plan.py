"""The plan of a run: which faults hit which targets, and when. It is drawn from a seed and can be repeated.

draw(seed, ...) -> Plan -> plan.json -> (injector)          --plan plan.json -> the same Plan
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

#: The pydantic settings for plans that are read from files: no other fields, and times that are finite.
EXACT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: the roles of its targets, its shortest and longest duration (s), its weight among kinds."""

    roles: tuple[str, ...]
    seconds: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0


PROCESSES: Final = ("worker", "gateway", "sweeper", "client")
SERVERS: Final = ("broker", "store")

#: All kinds of faults. `seconds` are for a lease of 10 s; draws scale them with the lease.
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

#: Role -> weight among targets.
_SHARES: Final = {"worker": 6.0, "gateway": 2.0, "client": 2.0, "sweeper": 1.0}
#: Changes of a clock (s).
_JUMPS: Final = (-30.0, -3.0, 3.0, 30.0, 3600.0)
#: Share of faults that come at the same instant as the one before.
_TOGETHER: Final = 0.2


@with_config(EXACT)
@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    `at`: seconds after the load began. `target`: name of a process, server or link. `seconds`: its duration. `amount`:
    for a clock, its change (s); for a delay, the wait of each piece (s); for a cut, the bytes of an answer before it.
    """

    at: float
    kind: str
    target: str
    seconds: float = 0.0
    amount: float = 0.0


@with_config(EXACT)
@dataclass(frozen=True, slots=True)
class Plan:
    """A run's load and faults. `shape`: further settings that its runner needs to repeat the run."""

    seed: int
    seconds: float
    lease: float
    faults: tuple[Fault, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan. Raises ValueError if the file holds none."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} holds no plan: {error.errors(include_url=False)[0]}") from error


#: A function: kind of fault -> role -> names of possible targets.
Able = Callable[[str], Mapping[str, Sequence[str]]]


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
    """Draw a plan of `seconds`.

    `kinds`: kinds of faults to draw from. `pause`: bounds of the time between two instants with faults (s). With
    `kills`, the plan is as long as that many kills need. Raises ValueError if no target can suffer any of the kinds.
    """
    possible = [kind for kind in kinds if any(able(kind).values())]
    if not possible or (kills is not None and "kill" not in possible):
        raise ValueError(f"nothing here can suffer {', '.join(kinds) or 'anything'}")
    rng = random.Random(f"{seed} faults")  # noqa: S311 - it draws faults, it guards nothing
    faults: list[Fault] = []
    for at in _instants(rng, seconds, pause, endless=kills is not None):
        if kills is not None and sum(fault.kind == "kill" for fault in faults) >= kills:
            seconds = faults[-1].at + lease  # streams that the last kill stopped resume under load
            break
        faults.append(_draw_fault(rng, at, able, possible, lease))
    return Plan(seed, seconds, lease, tuple(faults), dict(shape or {}))


def _instants(rng: random.Random, seconds: float, pause: tuple[float, float], *, endless: bool) -> Iterator[float]:
    at = rng.uniform(*pause)
    while endless or at < seconds:
        yield at
        if rng.random() >= _TOGETHER:
            at = round(at + rng.uniform(*pause), 3)


def _draw_fault(rng: random.Random, at: float, able: Able, kinds: Sequence[str], lease: float) -> Fault:
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
