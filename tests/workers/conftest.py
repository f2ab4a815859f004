"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery

from tests.producers.conftest import proxy
from tests.workers.rig import Rig, rig
from workers import progress

__all__ = ["proxy"]


@pytest.fixture(name="rig")
def _rig() -> Iterator[Rig]:
    """An empty Valkey; the workers started on it are killed at the end."""
    with rig() as made:
        yield made


@pytest.fixture(scope="module")
def served() -> Iterator[Rig]:
    """A Valkey with one worker, shared by a module's tests: a step takes 10 ms, ordinary tasks run beside."""
    with rig() as made:
        made.worker(events=True, STUB_STEP_S=0.01, WORKER_PLUGINS="tests.workers.plugins:ordinary_tasks")
        yield made


@pytest.fixture
def app(served: Rig) -> Iterator[Celery]:
    """A plain Celery application beside that worker."""
    app = served.sender()
    yield app
    app.close()


@pytest.fixture
def progress_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that commands show as their progress, but for quiet ones."""
    texts: list[str] = []

    def show(self: progress.Progress, text: str | Callable[[], str]) -> None:
        if not self._quiet:
            texts.append(text if isinstance(text, str) else text())

    monkeypatch.setattr(progress.Progress, "show", show)
    return texts
