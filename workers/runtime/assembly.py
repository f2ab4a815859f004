"""Makes the parts of one worker process and connects them: a part knows those that come after it on a task's way
(`workers.runtime`), and is told of the others by plain callables."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from celery import Celery
from celery.worker import state
from redis import Redis

from producers.contract import levels
from producers.contract.profile import Profile
from producers.release import release
from workers.breaker import Breaker, Window, kind_of
from workers.energy import EnergyAccount, ProcessorTime, open_meter
from workers.engine_process.front import ProcessEngine
from workers.flow import probe
from workers.flow.adapters import AdapterLoader
from workers.flow.celery_side import CelerySide
from workers.flow.claimer import Claimer
from workers.flow.deliveries import Acker, Deliveries
from workers.flow.finisher import Finisher
from workers.flow.intake import Intake
from workers.flow.monitors import Monitors
from workers.flow.publisher import Publisher
from workers.leases.housekeeper import Housekeeper
from workers.measure import Keeper, Measured
from workers.pool.transport import Link
from workers.runtime.cold_start import COLD_START
from workers.runtime.drain import Drain, Part, within
from workers.runtime.gpu_facts import GpuFacts
from workers.runtime.watchdog import Watchdog
from workers.state.clock import Clock
from workers.state.engine import ServedEngine
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: CUDA's message (cudaErrorECCUncorrectable) for an uncorrectable memory error.
ECC_ERROR = "uncorrectable ECC error"
#: Most running sequences in the lease, which others read every second or two.
SEQUENCES = 16
#: Figures of the engine in the lease.
STATS = (
    *(
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_blocks_cached",
        "kv_blocks_most",
        "kv_blocks_total",
        "steps",
        "prompt_tokens",
    ),
    *("cached_tokens", "generated_tokens", "preemptions", "out_of_memory", "not_finite", "drafted", "draft_accepted"),
)


class Runtime:
    """The parts. `announce` writes the model into a store."""

    def __init__(self, served: Served, app: Celery, announce: Callable[[Redis], object]) -> None:
        self.served = served
        self.began = round(time.time(), 3)
        settings, engine = served.settings, served.engine
        clock = Clock()
        self.acker = Acker(served.connect_broker(), settings.store)
        self.deliveries = Deliveries(served, self.acker)
        self.monitors = Monitors(app, self.deliveries, settings.name)
        self.finisher = Finisher(served, app, self.deliveries, clock, self.monitors)
        device = engine.stats().device
        self.window = Window(kind_of(device))
        send_probe = partial(probe.send_timed, engine)
        self.breaker = Breaker(
            self.window,
            clock,
            send_probe,
            self._break_down,
            enabled=settings.breaker,
            explain=lambda: str(getattr(engine.stats(), "slow_rank", "")),
        )
        self.gpu = GpuFacts(device)
        processor_time = ProcessorTime(engine)
        meter = open_meter(device, self.gpu.reading, settings.core_watts, processor_time)
        energy = None if meter is None else EnergyAccount(meter, shared=settings.engine.get("share") is not None)
        self.measured = Measured(
            engine,
            served.model,
            COLD_START.first_token,
            self.window.on_step,
            lambda: COLD_START.ready_at,
            energy,
            processor_time,
        )
        self.keeper = Keeper(served, self.measured, self.profile)
        self.publisher = Publisher(
            served, self.deliveries, self.finisher, self._break_down, self.measured, self.breaker
        )
        shared = (self.deliveries, clock, self.publisher, self.finisher)
        self.adapters = AdapterLoader(served, self.deliveries)
        self.claimer = Claimer(served, *shared, self.adapters)
        self.celery = CelerySide(
            served,
            self.deliveries,
            clock,
            self.claimer,
            self.publisher,
            self.finisher,
            self.acker.broker,
            self.monitors,
            self.breaker,
        )
        self.intake = Intake(served, self.deliveries, self.acker, self.celery)
        #: Where Celery's transport is plugged in; `celery` is what its pool knows.
        self.link = Link(self.intake, self.celery, served.connect_sender(), served.control_url)
        self.housekeeper = Housekeeper(served, *shared, self.describe, announce, self.keeper, self.breaker)
        self.intake.has_part = self.housekeeper.holdings.has_part
        self.watchdog = Watchdog(
            served, self.gpu, self.publisher, self.intake, self.give_up, self.housekeeper.renew_soon
        )
        release = partial(self.finisher.release, why="drained")
        self.drain = Drain(engine, self.deliveries, release, lambda: self.housekeeper.lease.round_trip)
        self.parts = self.drain.parts = self._in_order()
        self.given_up = ""
        self._call_back(engine)

    def _in_order(self) -> tuple[Part, ...]:
        """Returns the parts in the order of their start; the drain stops them in reverse. What a part hands on, those
        above it take: they are there before the first delivery, and until the last."""
        return (
            Part(self.watchdog.start, None),  # to the end: it sees what hangs while the others stop
            Part(self.gpu.start, None),  # to the end: it may be waiting for the driver
            Part(self.housekeeper.start, self._give_up_lease),  # last: the lease stands over all that is in flight
            Part(self.acker.start, self.acker.stop),  # once nothing more is put down
            Part(self.finisher.start, self.finisher.stop),  # once all has ended or is let go
            Part(None, self.drain.let_go),  # what is left, once its tokens are published
            Part(self.publisher.start, self.publisher.stop),  # once nobody begins or ends a task any more
            Part(self.adapters.start, self.adapters.stop),  # once no task asks for one any more
            Part(self.claimer.start, self.claimer.stop),  # once nothing more comes
            Part(None, self.drain.abort),  # before the claimer, which may be waiting for the engine
            Part(self.intake.start, self._fetch_no_more),  # first, when the drain begins
        )

    def _call_back(self, engine: ServedEngine) -> None:
        """Sets the parts' callbacks."""
        engine.on_lost, engine.on_step = self._device_lost, self._stepped
        if isinstance(engine, ProcessEngine):
            engine.share(self.publisher.on_event, self.publisher.on_tokens)
        self.breaker.on_change = self._breaker_changed
        self.celery.close, self.celery.stop = self.intake.stop, self._celery_stops
        self.monitors.nudge = self.intake.nudge
        self.housekeeper.on_epoch = self._break_down
        self.housekeeper.control.on_drain = lambda why: self.stop(self.served.settings.drain, why)

    def start(self) -> None:
        """Raises redis errors when broker or store cannot be reached: a worker without a lease must not begin."""
        self.housekeeper.begin_life(self.deliveries.life)
        for part in self.parts:
            if part.start is not None:
                part.start()

    def _stepped(self) -> None:
        """The engine's thread, after each step."""
        self.publisher.on_step()
        if self.served.engine.kind != "generate":
            self.deliveries.on_step()
        self.measured.on_step()

    def _breaker_changed(self) -> None:
        """Any thread."""
        self.deliveries.limit = self.breaker.room
        self.intake.poke()
        self.housekeeper.breaker_changed()

    # ---- its end --------------------------------------------------------------------------------------------------

    def stop(self, seconds: float, why: str, status: int = 0, suspects: Collection[str] | None = frozenset()) -> None:
        """End this worker: drain for at most `seconds`, then exit. Any thread; again, to make it shorter."""
        state.should_stop = state.should_stop or 0
        self.drain.begin(seconds, why, status, suspects)
        self.intake.nudge()

    def _celery_stops(self, at_once: bool) -> None:
        """Waits until all is handed back when Celery's worker ends, because of us or by itself. Its main thread."""
        self.drain.begin(0.0 if at_once else self.served.settings.drain, "Celery's worker stops")
        self.drain.over.wait()

    def _fetch_no_more(self, seconds: float) -> bool:
        self.intake.stop()
        self.housekeeper.renew_soon()  # its pool's workers are without this one now
        return True

    def _give_up_lease(self, seconds: float) -> bool:
        """Gives the lease up, on connections that nobody needs any more; if that takes too long, it lapses, with
        nothing under it. Then stores this worker's measurements, which can be missed."""
        store, lease = self.finisher.redis, self.housekeeper.lease

        def give_up() -> None:
            lease.give_up(self.deliveries.life, store, self.acker.broker)
            self.keeper.send(store)
            self.keeper.keep(store)

        if not within(give_up, seconds):
            logger.warning("All is handed back; the lease is left to lapse: store or broker answer slowly")
        self.housekeeper.stop()
        return True

    def notice(self, seconds: float, why: str) -> None:
        """The machine is to be taken away in `seconds`. Any thread."""
        self.stop(min(seconds, self.served.settings.drain), why)

    def give_up(self, why: str, suspects: Collection[str] | None) -> None:
        """Hand the tasks of this broken process over, and end it with a status that says so. Any thread.

        `suspects`: see `Drain.begin`. What is broken cannot be stopped, but nothing that it does later counts: its
        requests are dropped, its claims released or its incarnation over.
        """
        if not self.given_up:
            self.given_up = why
            logger.critical("Giving this worker up: %s", why)
            self.housekeeper.renew_soon()
            self.stop(0.0, why, os.EX_SOFTWARE, suspects)

    def _break_down(self, why: str) -> None:
        """Give up; no task is to blame."""
        self.give_up(why, frozenset())

    def _device_lost(self, why: str, suspects: set[str]) -> None:
        """Give up; no task is to blame for memory that failed."""
        self.give_up(f"the device is lost: {why}", frozenset() if ECC_ERROR in why else suspects)

    # ---- its state ------------------------------------------------------------------------------------------------

    def unready(self) -> list[str]:
        """Returns the reasons why it takes no tasks; empty if it does."""
        reasons, life = self.faults(), self.deliveries.life
        if self.deliveries.draining:
            reasons.append("it drains")
        elif unrenewed := self.housekeeper.unrenewed():
            reasons.append(unrenewed)
        elif not life.begun or life.over:
            reasons.append("it has no lease: the store or the broker does not answer")
        return reasons

    def faults(self) -> list[str]:
        """Returns the reasons why it is broken or stuck; empty if it is well."""
        reasons = (self.given_up, self.breaker.reason)
        return [*filter(None, reasons), *self.watchdog.reasons, *self.acker.broker.faults()]

    def profile(self) -> Profile:
        """The measurements of itself."""
        return self.measured.profile(COLD_START.figures)

    def _shared(self) -> dict[str, float]:
        """The engine's share of its device, the time (s) that it has waited for its turn, and the part of its time with
        work that it had the turn; empty if it shares none."""
        share, engine = self.served.settings.engine.get("share"), self.served.engine
        if share is None or engine.turn_wait_s is None:
            return {}
        waited = engine.turn_wait_s
        return {
            "share": share,
            "turn_wait_s": round(waited, 3),
            "turn_share": round(self.measured.turn_share(waited), 3),
        }

    def _sequences(self) -> list[list[str | int]]:
        """The sequences that hold most of the KV cache: its task's id, and what `engine.Held` has. The probe's is no
        task's."""
        rows: list[list[str | int]] = []
        for uuid, *held in self.served.engine.largest(SEQUENCES):
            if (delivery := self.deliveries.by_uuid.get(uuid)) is not None:
                rows.append([delivery.task_id, *held])
        return rows

    def _processes(self, stats: Any) -> dict[str, Any]:
        """The processes that compute the model with the worker's; empty if there are none."""
        settings = self.served.settings
        said: dict[str, Any] = {"engine_process": True} if settings.engine_process else {}
        tensor, pipeline = (settings.engine.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel"))
        if tensor * pipeline > 1:
            said |= {
                "tensor_parallel": tensor,
                "pipeline_parallel": pipeline,
                "slow_rank": getattr(stats, "slow_rank", ""),
            }
        return said

    def describe(self) -> str:
        """Returns the description of this worker (JSON) for its lease."""
        served, stats, gpu = self.served, self.served.engine.stats(), self.gpu.latest
        breaker, slow = self.breaker, self.breaker.slowness()
        return json.dumps(
            {
                "worker": served.settings.name,
                "release": release(),
                "level": levels.LEVEL,
                "began": self.began,
                "queue": served.pool.queue,
                "model": served.model,
                "version": served.card["version"],
                "device": stats.device,
                "kind": served.engine.kind,
                **self._processes(stats),
                "tasks": len(self.deliveries),
                "patient": self.deliveries.ledger.throughput_count,
                "draining": self.deliveries.draining,
                "unready": self.faults(),
                "capacity": served.engine.max_num_seqs,
                **{name: getattr(stats, name) for name in STATS},
                "sequences": self._sequences(),
                "false_takeovers": self.housekeeper.lease.false_takeovers,
                "recomputed_tokens": self.housekeeper.lease.recomputed_tokens,
                "waits": self.deliveries.waits(),
                "profile": self.profile().to_dict(),
                "breaker": breaker.state,
                "breaker_open": int(not breaker.closed),
                "breaker_openings": breaker.openings,
                "engine_failures": breaker.failures,
                "slowness": None if slow is None else round(slow.ratio, 2),
                "figures": self.window.figures().to_dict(),
                **({} if gpu is None else {"gpu": gpu}),
                **self.intake.describe(),
                **self._shared(),
                **({"adapters": adapters} if (adapters := self.adapters.describe()) else {}),
            }
        )
