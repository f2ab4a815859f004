"""The plan of a system on one machine, and its workers: for each model a pool of each version that runs here.

start: the least number of the resolved version -> the autoscaler decides how many -> Local starts and drains them
a rolling update begins (`producers.store.fleet.rollouts`): the new version is a pool beside the old one. So is the old
one where this `up` was started in the middle of it, if the update names that version's folder
it is done: the pool whose version is not the card's is forgotten when its last worker has ended and nothing of it is
left. Tasks keep their version: so those that a rolled-back candidate took are done by it, also by a later `up`, or end
as dead letters where they kill its workers
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.execution.threads import threads_of_each
from engine.text.checkpoint import model_version
from producers.admin.fleet import Fleet
from producers.connection.connect import is_redis
from workers.autoscaler import watch
from workers.autoscaler.actuators.local import Local, Slots
from workers.autoscaler.policy import Rules
from workers.autoscaler.pools import KEEP_WARM_S, PoolSettings, Scaled
from workers.cli.gpus import Chosen
from workers.library import ResolvedModel
from workers.processes import PENSTOCK
from workers.processes.supervisor import Child, Program, Warm


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to run.

    `rules`: the number of each model's workers. `scaled`: whether an autoscaler runs here; else it is the least number.
    `gpus`: each worker gets one, and each model as many as its most workers. `standby_s`: the time (s) for which a
    standby process is kept; None: there is none.
    """

    models: tuple[ResolvedModel, ...]
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    broker: str | None = None
    store: str | None = None
    rules: Rules = Rules(min=1)  # noqa: RUF009 - frozen
    scaled: bool = False
    standby_s: float | None = None
    gpus: tuple[Chosen, ...] = ()
    drain: float = 30.0
    log_level: str = "warning"
    worker_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    webhooks_options: tuple[str, ...] = ()
    health_ports: tuple[int | None, ...] = ()
    """A port for each worker, in the order of models and their most workers; empty: no ports."""
    files_dir: str | None = None
    sources: Path | None = None
    """The configuration of event sources; None: there are none."""
    shares: tuple[float, ...] = ()
    """Each model's share of the device; empty: each takes what it wants."""
    keep_warm_s: float = KEEP_WARM_S
    """Time for which a version keeps workers that another one has replaced."""
    turns: Path | None = None
    """The folder by which the models' workers take turns, each with all cores; None: they compute when they like."""

    @property
    def embedded(self) -> bool:
        """Whether it has a server of its own in `data_dir`: as both, or as the store of a broker on SQS."""
        return self.store is None and (self.broker is None or not is_redis(self.broker))

    @property
    def files(self) -> tuple[str, str]:
        """The option with the location of files, which all processes share."""
        return "--files-dir", str(self.files_dir or self.data_dir / "files")


@dataclass(slots=True)
class LocalPools:
    """All pools of one `penstock up`. Called with the fleet, it gives those of this moment (`autoscaler.pools.Pools`).

    `name`: the name of this `up`, with which its workers' names begin: HOST.PID.ID. Containers may share a host name
    and their process ids, so the workers of each `up` are told apart by ID. `env`: the workers' environment.
    `say(name, line)` gets their output.
    """

    plan: Plan
    name: str
    env: Mapping[str, str]
    say: Callable[[str, str], None]
    standby: Warm | None = None
    _models: list[_Model] = field(init=False)

    def __post_init__(self) -> None:
        self._models = [_Model(self, number, model) for number, model in enumerate(self.plan.models)]

    @property
    def children(self) -> list[Child]:
        """All workers that were started."""
        return [child for local in self.locals() for child in local.children]

    async def start(self) -> None:
        """Start the least number of workers, which are not restarted yet. Raises ActuatorError."""
        for model in self._models:
            await model.start()

    def go_on(self) -> None:
        """Keep workers running that die, from now on."""
        for model in self._models:
            model.go_on()

    def hasten(self) -> None:
        """Make all workers hand back their running tasks now."""
        for local in self.locals():
            local.hasten()

    async def kill(self) -> None:
        await asyncio.gather(*(local.kill() for local in self.locals()))

    async def stop(self) -> None:
        """Drain all workers, and wait for their end."""
        await asyncio.gather(*(local.aclose() for local in self.locals()))

    def __call__(self, fleet: Fleet) -> Sequence[Scaled]:
        return [pool for model in self._models for pool in model.scaled(fleet)]

    @property
    def names(self) -> list[str]:
        """The pools' names."""
        return [f"{model.name}@{version}" for model in self._models for version in model.versions]

    def locals(self) -> list[Local]:
        """The actuators of all versions."""
        return [local for model in self._models for local in model.versions.values()]


class _Model:
    """One model's pools, by version. `number`: its index among the models of this `up`, from 0."""

    def __init__(self, pools: LocalPools, number: int, model: ResolvedModel) -> None:
        plan = pools.plan
        self._pools, self._plan, self._number, self.name = pools, plan, number, model.name
        self._each = plan.rules.max
        self._slots = Slots(self._each if plan.gpus else None)
        self._initial_version = model_version(model.folder)
        self.versions = {self._initial_version: self._local(model.reference)}

    async def start(self) -> None:
        local = self.versions[self._initial_version]
        local.restart = False
        await local.scale(self._plan.rules.min)

    def go_on(self) -> None:
        for local in self.versions.values():
            local.go_on()

    def scaled(self, fleet: Fleet) -> list[Scaled]:
        """The pools of this moment."""
        rollout = fleet.scaling.rollouts.get(self.name, {})
        references = _references(rollout)
        rolling = references if rollout.get("phase") in ("starting", "draining") else {}
        for version, reference in references.items():
            if reference and version not in self.versions and (version in rolling or self._remaining(fleet, version)):
                self.versions[version] = self._local(str(reference))
        card = fleet.versions.get(self.name)
        for version, local in list(self.versions.items()):
            ended = version != card and version not in rolling and not local.children
            if ended and card in self.versions and self._remaining(fleet, version) == 0:
                del self.versions[version]
        # A version that is not the card's has the number that its rollout waits for, or ends: the autoscaler's part.
        # One that is only kept warm gives its GPU to the card's version where that one needs it.
        default = self.versions.get(card or "")
        keep_warm_s = 0.0 if default is not None and default.waits_for_slot else self._plan.keep_warm_s
        versions = [version for version in self.versions if rolling or not self._left_alone(version)]
        return [self._pool(version, keep_warm_s) for version in versions]

    def _remaining(self, fleet: Fleet, version: str) -> int | None:
        return watch.remaining_tasks(fleet, PoolSettings(self.name, version))

    def _left_alone(self, version: str) -> bool:
        """Whether the pool is left alone: it has a fixed number, and an operator told one of its workers to stop."""
        return self._plan.rules.min == self._plan.rules.max and self.versions[version].stopped_by_others

    def _pool(self, version: str, keep_warm_s: float) -> Scaled:
        settings = PoolSettings(self.name, version, self._plan.rules, keep_warm=keep_warm_s)
        return Scaled(settings, self.versions[version])

    def _local(self, reference: str) -> Local:
        pools, plan = self._pools, self._plan

        def program(slot: int) -> Program:
            return self._program(reference, slot)

        return Local(self.name, self._slots, program, pools.say, plan.drain, standby=pools.standby)

    def _program(self, reference: str, slot: int) -> Program:
        """The worker in a slot. Slots beyond the largest number, used while versions overlap, have no port."""
        plan, total = self._plan, self._each * len(self._plan.models)
        name = "worker" if total == 1 and slot == 1 else f"worker.{self.name}.{slot}"
        argv = [*PENSTOCK, "worker", "--model", reference, "--drain-timeout", str(plan.drain)]
        if plan.shares:
            argv += ["--share", repr(plan.shares[self._number])]
        if plan.turns is not None:
            argv += ["--turns", str(plan.turns)]
        elif total > 1:  # the user's own options come later on the command line, and win
            argv += ["--threads", str(threads_of_each(total))]
        argv += [*plan.files, *plan.worker_options, "--log-level", plan.log_level]
        env = dict(self._pools.env)
        index = self._number * self._each + slot - 1
        if plan.health_ports and slot <= self._each and plan.health_ports[index] is not None:
            argv += ["--health-port", str(plan.health_ports[index])]
        if plan.gpus:
            argv += ["--device", "cuda"]
            env["CUDA_VISIBLE_DEVICES"] = plan.gpus[index].visible
        argv += ["--name", f"{self._pools.name}.{name}"]
        return Program(name, argv, env, notifies=True)


def _references(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """The two versions of a model's last rollout, with their references; None or "" without one."""
    both = (("version", "reference"), ("before", "before_reference"))
    return {str(rollout[version]): rollout.get(reference) for version, reference in both if version in rollout}
