"""Engines for workers whose engine has a process of its own (`engine_factory`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from engine.errors import AdapterRoomError, EngineClosedError, ModelError
from engine.request import Request
from tests.stub_engine import StubEngine
from workers.errors import Refused
from workers.flow import probe


class Halves(StubEngine):
    """Its steps name the requests with an even seed alone, as if the others waited in it."""

    @property
    def on_under_way(self) -> Callable[[list[str]], None] | None:
        return self._names

    @on_under_way.setter
    def on_under_way(self, tell: Callable[[list[str]], None]) -> None:
        def named(ids: list[str]) -> None:
            tell([name for name in ids if not (self._running[name].request.params.seed or 0) % 2])

        self._names = named

    _names: Callable[[list[str]], None] | None = None


class Spacious(StubEngine):
    max_model_len = 1 << 20


def spacious(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    return Spacious(model), {}


class Adapting(StubEngine):
    """It has room for one adapter, and does not find another."""

    def load_adapter(self, name: str, path: str) -> Any:
        if name == "large":
            raise AdapterRoomError("there is no room", 7)
        if name == "broken":
            raise ModelError("there is no adapter")
        return super().load_adapter(name, path)


class Closed(StubEngine):
    """It takes nothing but probes and the requests of `one`."""

    def submit(self, request: Request, on_event: Any) -> None:
        if request.id not in (probe.ID, "one"):
            raise EngineClosedError("the engine is closed")
        super().submit(request, on_event)


def closed(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    return Closed(model), {}


class Formless(StubEngine):
    """It dies of a form."""

    def submit(self, request: Request, on_event: Any) -> None:
        if request.params.forms:
            os._exit(9)
        super().submit(request, on_event)


def formless(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    return Formless(model), {}


def adapting(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    return Adapting(model), {}


def halves(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    return Halves(model), {}


def refused(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    raise Refused("this model cannot be served")


def dead(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    os._exit(9)
