"""Settings of one worker process: where queue and store are, which model it serves, how patient it is."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from producers.store.protocol import MAX_DEATHS
from producers.sweeper.reader_leases import LEASE_S


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
    engine_factory: str = "workers.runtime.serving:load_engine"
    """`module:callable` that is given (model, engine settings) and returns what behaves like `engine.Engine`, and the
    model's tokenizer files by name."""
    lease: float = 10.0
    """A worker that is not heard of for this long is dead, and its tasks go to others."""
    reader_lease: float = LEASE_S
    """That of the gateways: what nobody reads any more is cancelled here where no gateway is left."""
    drain: float = 30.0
    """On SIGTERM, how long running tasks may go on before they are handed back with their tokens."""
    step_limit: float = 180.0
    """A step that has not ended by then never will: tasks go to others and the process ends. 0: wait for ever."""
    health_port: int | None = None
    """Serve /livez and /readyz there; 0: any that is free."""
    health_host: str = "0.0.0.0"  # noqa: S104 - whoever runs it asks from outside
    spot_notice: str | None = None
    """`aws`: ask the instance's metadata service whether it is about to be taken away, and drain then."""
    spot_endpoint: str | None = None
    """Where that service is, if not where AWS has it."""
    ageing: float = 30.0
    """A list whose head waits unserved for this long counts as one tier higher."""
    release_preempted: float = 5.0
    """A task preempted for this long goes back to the queue, where another worker may have room."""
    retry_after: float = 1.0
    """Delay of a message given back because another worker holds its task."""
    max_deaths: int = MAX_DEATHS
    """A task is given up when so many workers died on it with no new token, or four times as many in all."""
    max_redeliveries: int = 5
    """Workers that may die between fetching a message and claiming its task before it is given up."""
    max_retries: int = 3
    """Times that a task is put back by Celery's retry after a fault of the engine."""
    events: bool = False
    """Send Celery's task events from the start. Heartbeats go out in any case, and Celery's `enable_events` turns task
    events on at run time, which Flower does."""
