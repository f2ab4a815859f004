"""The loaded LoRA adapters by name. No torch."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from engine.declared import shown
from engine.errors import EngineError, ErrorText, RequestError
from engine.request import LoadedAdapter

A = TypeVar("A", bound=LoadedAdapter)


class AdapterTable(Generic[A]):
    """The adapters that requests may name. Thread-safe.

    Removing an adapter ends no request: each keeps its adapter, whose memory is free when the last of them has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, A] = {}

    def add(self, name: str, adapter: A) -> None:
        """Raises EngineError for a name that is taken by an adapter of another version."""
        with self._lock:
            existing = self._by_name.setdefault(name, adapter)
        if existing.version != adapter.version:
            raise EngineError(f"an adapter named {name!r} is loaded already; unload it first")

    def remove(self, name: str) -> bool:
        """Returns False if there is none of this name."""
        with self._lock:
            return self._by_name.pop(name, None) is not None

    def find(self, name: str) -> A:
        """Raises RequestError if there is none of this name."""
        with self._lock:
            adapter = self._by_name.get(name)
            names = ", ".join(sorted(self._by_name)[:5])
        if adapter is None:
            available = f"loaded are {names}" if names else "none is"
            raise RequestError(ErrorText.of("{adapter}={} is not loaded; {}", shown(name), available), param="adapter")
        return adapter

    def items(self) -> dict[str, A]:
        with self._lock:
            return dict(self._by_name)
