"""A source: it takes what comes from one place and makes tasks or batches of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from producers.client.aio import AsyncClient
from producers.errors import shown


@dataclass(frozen=True, slots=True)
class Context:
    """A source's surroundings, which its process gives it. `process`: a name that no other process has."""

    client: AsyncClient
    store_url: str
    """For connections that wait: those of `client` are few, and all sources share them."""
    process: str
    files_dir: str
    """The folder, or the URL of a bucket, for files' content: that of gateways and sweepers."""


class Source(ABC):
    """One table of the configuration, at work. `name`: that of the table."""

    name: str

    @abstractmethod
    async def run(self) -> None:
        """Take what comes, until cancelled; then give back what was taken, and raise the cancellation.

        Whatever else it raises, it is run again after a pause: what is lost then must be found again by `run`.
        """

    @abstractmethod
    def unready(self) -> list[str]:
        """The reasons why it takes nothing now; empty while it does."""


class SourceSettings(BaseModel, ABC):
    """A table of the configuration, checked. A type's settings add their own fields.

    A field's description completes "it must be ..." in the message that refuses it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    type: str

    @abstractmethod
    def source(self, name: str, context: Context) -> Source:
        """The source. It connects to nothing yet. Raises ValueError for what settings alone cannot tell."""


def fitting(is_one: Callable[[Any], bool], form: str) -> AfterValidator:
    """Refuses a setting that is not of the form."""

    def check(value: Any) -> Any:
        if not is_one(value):
            raise ValueError(f"it is {shown(value)}; it must be {form}")
        return value

    return AfterValidator(check)


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run parts of a source side by side. When one fails, the others are cancelled, and its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(tasks)
    for task in done:
        task.result()


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until all have given back what they took. Whoever is cancelled meanwhile waits as well:
    the process may end right after."""
    for task in tasks:
        task.cancel()
    told: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as cancelled:
            told = cancelled
    if told is not None:
        raise told


def as_tuple(value: Any) -> Any:
    """TOML's lists as the tuples that frozen settings hold."""
    return tuple(value) if isinstance(value, list) else value
