"""Makes the parts of one worker process and connects them.

    Intake -> (event loop: Celery's consumer) -> EnginePool -> Claimer -> engine -> Publisher -> Finisher -> Acker
    FETCH                                                      CLAIM               APPEND,      tracer,     ACK, BACK
                                                                                   FINISH       SETTLE

Each arrow is a queue between two threads; a delivery is in exactly one place (`workers.flow.deliveries`). A part knows
those that come after it, and is told of the others by plain callables.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from functools import partial

from celery import Celery
from celery.worker import state
from redis import Redis

from producers.contract.profile import Profile
from workers.breaker.breaker import Breaker
from workers.breaker.figures import Window
from workers.breaker.machine import kind_of
from workers.flow import probe
from workers.flow.acker import Acker
from workers.flow.celery_side import CelerySide
from workers.flow.claimer import Claimer
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.intake import Intake
from workers.flow.publisher import Publisher
from workers.leases.housekeeper import Housekeeper
from workers.measure.keeper import Keeper
from workers.measure.measured import Measured
from workers.runtime.cold_start import COLD_START
from workers.runtime.drain import Drain
from workers.runtime.host.gpu_facts import GpuFacts
from workers.runtime.watchdog import Watchdog
from workers.state.clock import Clock
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: CUDA's message (cudaErrorECCUncorrectable) for an uncorrectable memory error.
ECC_ERROR = "uncorrectable ECC error"


class Runtime:
    """The parts; Celery's pool and transport find it as `app.penstock`. `announce` writes the model into a store."""

    def __init__(self, served: Served, app: Celery, announce: Callable[[Redis], object]) -> None:
        self.served = served
        settings, engine = served.settings, served.engine
        clock = Clock()
        self.sender = served.connect_sender()
        self.acker = Acker(served.connect_broker(), settings.store)
        self.deliveries = Deliveries(served, self.acker)
        self.finisher = Finisher(served, app, self.deliveries, clock)
        device = engine.stats().device
        self.window = Window(kind_of(device))
        self.breaker = Breaker(
            self.window,
            clock,
            partial(probe.canary, engine),
            lambda why: self.give_up(why, frozenset()),
            enabled=settings.breaker,
        )
        self.measured = Measured(engine, COLD_START.first_token, self.window.on_step)
        self.keeper = Keeper(served, self.measured, self.profile)
        self.publisher = Publisher(
            served,
            self.deliveries,
            self.finisher,
            lambda why: self.give_up(why, frozenset()),
            self.measured,
            self.breaker,
        )
        self.claimer = Claimer(served, self.deliveries, clock, self.publisher, self.finisher)
        self.celery = CelerySide(served, self.deliveries, clock, self.claimer, self.publisher, self.finisher)
        self.intake = Intake(served, self.deliveries, self.acker, self.celery)
        self.housekeeper = Housekeeper(
            served,
            self.deliveries,
            clock,
            self.publisher,
            self.finisher,
            self.about,
            announce,
            self.keeper,
            self.breaker,
        )
        self.breaker.on_change = self._breaker_changed
        self.housekeeper.control.on_drain = lambda why: self.stop(settings.drain, why)
        self.gpu = GpuFacts(device)
        self.watchdog = Watchdog(
            served, self.gpu, self.publisher, self.intake, self.give_up, self.housekeeper.renew_soon
        )
        self.drain = Drain(
            engine,
            self.deliveries,
            intake=self.intake,
            claimer=self.claimer,
            publisher=self.publisher,
            finisher=self.finisher,
            acker=self.acker,
            housekeeper=self.housekeeper,
        )
        self.given_up = ""
        engine.on_lost = self._device_lost
        engine.on_step = self._stepped

    def start(self) -> None:
        """Raises redis errors when broker or store cannot be reached: a worker without a lease must not begin."""
        self.housekeeper.begin_life(self.deliveries.life)
        self.gpu.start()
        for thread in (self.acker, self.finisher, self.publisher, self.claimer, self.housekeeper, self.intake):
            thread.start()
        self.watchdog.start()

    def _stepped(self) -> None:
        """The engine's thread, after each step."""
        self.publisher.on_step()
        self.measured.on_step()

    def _breaker_changed(self) -> None:
        """Any thread."""
        self.intake.limit(self.breaker.room)
        self.deliveries.held_back = self.breaker.room == 0
        self.housekeeper.breaker_changed()

    # ---- its end --------------------------------------------------------------------------------------------------

    def stop(self, seconds: float, why: str, status: int = 0, suspects: Collection[str] | None = frozenset()) -> None:
        """End this worker: drain for at most `seconds`, then exit. Any thread; again, to make it shorter."""
        state.should_stop = state.should_stop or 0
        self.drain.begin(seconds, why, status, suspects)
        self.intake.nudge()

    def notice(self, left: float, why: str) -> None:
        """The machine is to be taken away in `left` seconds. Any thread."""
        self.stop(min(left, self.served.settings.drain), why)

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

    def _device_lost(self, why: str, suspects: set[str]) -> None:
        """Give up; no task is to blame for memory that failed."""
        self.give_up(f"the device is lost: {why}", frozenset() if ECC_ERROR in why else suspects)

    # ---- how it is ------------------------------------------------------------------------------------------------

    def unready(self) -> list[str]:
        """Why it takes no tasks; empty where it does."""
        found, life = self.faults(), self.deliveries.life
        if self.deliveries.draining:
            found.append("it drains")
        elif not life.begun or life.over:
            found.append("it has no lease: the store or the broker does not answer")
        return found

    def faults(self) -> list[str]:
        """Reasons why it is broken or stuck; empty where it is well."""
        own = (self.given_up, self.breaker.reason)
        return [*filter(None, own), *self.watchdog.reasons, *self.acker.broker.faults()]

    def __json__(self) -> str:
        """The form in which `inspect stats` shows the transport's options, of which this is one."""
        return self.served.settings.name

    def profile(self) -> Profile:
        """The measurements of itself."""
        return self.measured.profile(COLD_START.figures)

    def about(self) -> str:
        """The lease's text about this worker (JSON)."""
        served, stats, gpu = self.served, self.served.engine.stats(), self.gpu.latest
        breaker, slow = self.breaker, self.breaker.slowness()
        return json.dumps(
            {
                "worker": served.settings.name,
                "queue": served.pool.queue,
                "model": served.model,
                "version": served.card["version"],
                "tasks": len(self.deliveries),
                "patient": self.deliveries.ledger.patient,
                "draining": self.deliveries.draining,
                "unready": self.faults(),
                "capacity": served.engine.max_num_seqs,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_blocks_used": stats.kv_blocks_used,
                "kv_blocks_most": stats.kv_blocks_most,
                "kv_blocks_total": stats.kv_blocks_total,
                "steps": stats.steps,
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "generated_tokens": stats.generated_tokens,
                "preemptions": stats.preemptions,
                "out_of_memory": stats.out_of_memory,
                "not_finite": stats.not_finite,
                "drafted": stats.drafted,
                "draft_accepted": stats.draft_accepted,
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
            }
        )
