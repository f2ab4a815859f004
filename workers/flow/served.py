"""The served model: facts about it that several parts of a worker need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from producers.contract import keys
from workers.settings import WorkerSettings


@dataclass(slots=True)
class Served:
    """The model, what computes it, and the queues that its tasks come from."""

    settings: WorkerSettings
    engine: Any
    """Behaves like `engine.Engine`."""
    card: dict[str, Any]
    """The model's, as announced."""
    files: dict[str, bytes]
    """The tokenizer's, by name, as announced with the card."""
    queue: str
    """The pool's own."""
    weights: dict[str, float] = field(default_factory=dict)
    """Tenants' shares, where they are not 1; as last read from the broker."""

    @property
    def model(self) -> str:
        """The name that tasks ask for."""
        name: str = self.card["name"]
        return name

    @property
    def queues(self) -> list[str]:
        """Names of the queues that it fetches from."""
        return [self.queue, keys.model_queue(self.model)]
