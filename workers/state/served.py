"""The served model: facts about it that several parts of a worker need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from producers.broker.base import Consumer, Sender
from producers.broker.connect import can_place, connect_consumer, connect_sender, control_url
from producers.connection.connect import SILENT_S, connect
from producers.contract.keys import Pool
from producers.store.files import MessageBlobs
from workers.settings import WorkerSettings
from workers.state.engine import ServedEngine


@dataclass(slots=True)
class Served:
    """The model, its engine, and the queues that its tasks come from."""

    settings: WorkerSettings
    engine: ServedEngine
    card: dict[str, Any]
    """The model's, as announced."""
    files: dict[str, bytes]
    """The tokenizer's, by name, as announced with the card."""
    pool: Pool
    """Itself and the workers that compute alike."""
    takes_plain: bool = True
    """Whether this version serves the queue of plain Celery tasks, which names only the model; as last read."""
    weights: dict[str, float] = field(default_factory=dict)
    """Tenants' shares other than 1; as last read from the broker."""

    @property
    def model(self) -> str:
        """The name that tasks ask for."""
        name: str = self.card["name"]
        return name

    @property
    def places(self) -> bool:
        """Whether tasks are to go to the worker that holds the longest part of their prompt."""
        return places(self.settings, self.engine)

    @property
    def control_url(self) -> str:
        """The server that carries Celery's remote control."""
        return control_url(self.settings.broker, self.settings.store)

    def connect_sender(self) -> Sender | None:
        """Returns the sender for tasks that Celery publishes, for any thread; None if kombu sends them itself."""
        settings = self.settings
        if settings.broker == self.control_url:
            return None
        return connect_sender(settings.broker, settings.store, bodies=self.bodies())

    def bodies(self) -> MessageBlobs:
        """Returns the store of bodies of messages that were too large for their queue; for any thread."""
        return MessageBlobs(connect(self.settings.store), self.settings.files_dir)

    def connect_broker(self, timeout: float = SILENT_S) -> Consumer:
        """Connects to the broker, for one thread. `timeout`: of each answer (s)."""
        consumer = connect_consumer(
            self.settings.broker, self.pool.queues, self.settings.store, timeout, self.pool.version_queue
        )
        consumer.places = self.places
        return consumer


def places(settings: WorkerSettings, engine: ServedEngine) -> bool:
    """Whether a worker with these settings and this engine places tasks: both can, and its broker."""
    return settings.placement == "prefix" and engine.marked_block > 0 and can_place(settings.broker)
