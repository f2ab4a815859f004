"""Finds the models that somebody serves or scales: the others are withdrawn, unless an operator published them.

`producers.store.fleet.cards` has the rule and who follows it. `look` reads all models at once; `UnservedModels` is the
sweeper's part, `withdraw` that of `penstock up`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from producers.connection.script import aexecute_many, arun, parsed, seconds, text
from producers.contract import keys
from producers.store.fleet import cards
from producers.store.fleet.scaling import forget, is_fresh, read_states

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient

log = logging.getLogger(__name__)

#: Time (s) for which nobody has served or scaled a model when it is withdrawn: a worker that is started again is back.
GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model's card. `raw`: as it is stored. `workers`: those that serve its version, by their incarnations;
    `scaled_by`: autoscalers that start workers for it."""

    raw: bytes
    card: cards.Card
    workers: tuple[str, ...] = ()
    scaled_by: tuple[str, ...] = ()

    @property
    def attended(self) -> bool:
        """Whether somebody serves or scales it."""
        return bool(self.workers or self.scaled_by)


async def look(client: AsyncClient) -> dict[str, Model]:
    """All models, by name. Raises redis.exceptions.RedisError or OSError."""
    commands = (("HGETALL", keys.MODELS), ("HGETALL", keys.POOLS), ("HGETALL", keys.SCALE_POOLS), ("TIME",))
    models, pool_entries, states, now = await aexecute_many(client.store, commands)
    pools = {text(queue): parsed(entry) for queue, entry in pool_entries.items()}
    serving: dict[tuple[Any, Any], list[str]] = {}
    for worker in await client.broker.workers():
        pool = pools.get(worker.queue, {})
        if worker.remaining_s is not None:
            serving.setdefault((pool.get("model"), pool.get("version")), []).append(worker.incarnation)
    scalers: dict[str, str] = {
        name: str(state.get("by", ""))
        for name, state in read_states(states).items()
        if is_fresh(state.get("at"), seconds(now))
    }
    by_name = {}
    for name, (raw, card) in cards.parsed_cards(models).items():
        version = card["version"]
        scaled_by = tuple(scalers[pool] for pool in (name, f"{name}@{version}") if pool in scalers)
        by_name[name] = Model(raw, card, tuple(serving.get((name, version), ())), scaled_by)
    return by_name


class UnservedModels:
    """Withdraws models that nobody has served or scaled for a while, and lists those again that somebody does.

    A time begins anew when the card changes: a worker that announces its model has no lease yet. Names a publisher
    again that a worker of an earlier release has left out.
    """

    def __init__(self, client: AsyncClient, grace_s: float = GRACE_S) -> None:
        self._client, self._grace_s = client, grace_s
        self._since: dict[bytes, float] = {}
        self._publishers: dict[tuple[str, str], str] = {}
        """The publishers, by the model and the time of its publication."""

    async def sweep(self) -> dict[str, int]:
        """Look at all models once. Returns the numbers of those withdrawn and listed again. Raises
        redis.exceptions.RedisError or OSError; then the times begin anew."""
        since, self._since = self._since, {}
        kept, done, now = dict[bytes, float](), {"models_withdrawn": 0, "models_listed": 0}, time.monotonic()
        publishers, self._publishers = self._publishers, {}
        for name, model in (await look(self._client)).items():
            publication = name, str(model.card.get("published"))
            publisher = model.card.get("publisher") or publishers.get(publication)
            if publisher is not None:
                self._publishers[publication] = publisher
                if "publisher" not in model.card:
                    await arun(self._client.store, cards.name_publisher(model.raw, model.card, publisher))
                    continue
            if model.attended or cards.waits_alone(model.card):
                if "withdrawn" in model.card:
                    done["models_listed"] += bool(await arun(self._client.store, cards.offer(model.raw, model.card)))
                continue
            kept[model.raw] = since.get(model.raw, now)
            if "withdrawn" in model.card or now - kept[model.raw] < self._grace_s:
                continue
            if await arun(self._client.store, cards.withdraw(model.raw, model.card)):
                done["models_withdrawn"] += 1
                log.warning("model %s is withdrawn: nobody serves it, and nothing starts a worker for it", name)
        self._since = kept
        return done


async def withdraw(client: AsyncClient, ended: Callable[[str], bool]) -> list[str]:
    """Withdraw the models that an `up` published which has ended, unless others serve or scale them, and forget the
    decisions on their workers. Returns their names. `ended`: tells whether the `up` with this publisher has ended.
    Raises redis.exceptions.RedisError or OSError."""
    names = []
    for name, model in (await look(client)).items():
        publisher = str(model.card.get("publisher", ""))
        if not publisher.startswith(cards.UP) or "withdrawn" in model.card or not ended(publisher):
            continue
        its = name_of(publisher)
        if any(other != its and not other.startswith(its + ".") for other in (*model.workers, *model.scaled_by)):
            continue
        if await arun(client.store, cards.withdraw(model.raw, model.card)):
            names.append(name)
            await forget(client.store, (name, f"{name}@{model.card['version']}"))
    return names


def name_of(publisher: str) -> str:
    """The name of an `up`, HOST.PID.ID: its autoscaler's, too. Its workers' names are NAME.worker and so on."""
    process, _, run = publisher.removeprefix(cards.UP).rpartition(".")
    return f"{process}.{run.partition('-')[0]}"


def place() -> str:
    """Identifies the set of processes whose ids this process sees: 12 hexadecimal digits, of the system's boot and the
    namespace of process ids. Containers may share a host name. Returns "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def publisher_of(name: str) -> str:
    """The publisher of an `up` of this process. `name`: HOST.PID.ID, as an autoscaler."""
    return f"{cards.UP}{name}-{place()}"


def has_died(publisher: str, mine: str) -> bool:
    """Whether an `up` ran on this host, among processes whose ids this one sees, and has ended. One whose process id
    another process has now counts as running, and so does one of another container or before the system's start: a
    sweeper withdraws its models. `mine`: the publisher of this one, whose process id it may have had, too."""
    host, _, pid = name_of(publisher).rpartition(".")[0].rpartition(".")
    if publisher == mine or host != socket.gethostname() or not pid.isdecimal():
        return False
    _, placed, seen_from = publisher.rpartition(".")[2].partition("-")
    if placed and seen_from != place():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return int(pid) == os.getpid()
