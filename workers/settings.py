"""Settings of one worker process: where queue and store are, which model it serves, how patient it is."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from producers.store.protocol import MAX_DEATHS, READER_LEASE_S


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of `penstock worker`. Times are seconds."""

    broker: str
    store: str
    model: str
    """A reference, as `workers.library.find_model` reads it."""
    name: str = field(default_factory=lambda: f"{socket.gethostname()}.{os.getpid()}")
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `engine.EngineConfig`."""
    engine_factory: str = "workers.runtime.worker:load_engine"
    """`module:callable` that takes (model, engine settings) and returns an object like `engine.Engine`, and the model's
    tokenizer files by name."""
    engine_process: bool = False
    """Run the engine in a process of its own (`workers.engine_process`). Linux alone."""
    require_signature: tuple[str, ...] = ()
    """Files of public keys, one of which must have signed the model's manifest (`workers.library.signatures`); none:
    unsigned models are served."""
    lease: float = 10.0
    """Silence after which the worker counts as dead, and its tasks go to other workers."""
    reader_lease: float = READER_LEASE_S
    """The gateways' reader lease: workers cancel tasks of lost readers when no gateway is left."""
    files_dir: str | None = None
    """Folder or bucket for bodies of Celery messages that are too large for their queue; None: such are refused."""
    drain: float = 30.0
    """Time for which running tasks may go on after SIGTERM, before they are handed back with their tokens."""
    step_limit: float = 180.0
    """Longest engine step. A longer one counts as hung: tasks are handed back, the process exits. 0: no limit."""
    core_watts: float | None = None
    """Power of a busy core, for the energy of tasks on CPUs whose counters cannot be read; None: no energy is told."""
    breaker: bool = True
    """Take no tasks while the engine fails them, or is far slower than its peers' (docs/how/breaker.md)."""
    placement: str = "off"
    """`prefix`: tasks go to the worker that holds the longest part of their prompt (docs/how/placement.md); `off`."""
    health_port: int | None = None
    """Port of /livez and /readyz; 0: any free port; None: no port."""
    spot_notice: str | None = None
    """`aws`: ask the instance's metadata service for spot notices, and drain at one."""
    spot_endpoint: str | None = None
    """URL of the metadata service; None: AWS's own."""
    ageing: float = 30.0
    """Wait of a list's head after which the list counts as one tier higher."""
    release_preempted: float = 5.0
    """Time after which a preempted task returns to the queue, for another worker with free capacity."""
    retry_after: float = 1.0
    """Delay of a message given back because another worker holds its task."""
    max_deaths: int = MAX_DEATHS
    """Worker deaths without a new token after which a task is given up; or four times as many deaths in all."""
    max_redeliveries: int = 5
    """Worker deaths between a message's fetch and its claim after which its task is given up."""
    max_retries: int = 3
    """Number of retries through Celery after an engine fault."""
    events: bool = False
    """Send Celery's task events from the start. Heartbeats go out in any case, and Celery's `enable_events` turns task
    events on at run time, which Flower does."""
