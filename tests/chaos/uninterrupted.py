"""The same tasks once more, with nobody killed: what an interrupted stream should have become."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from producers import AsyncClient, Token
from tests.chaos.load import Followed, task_of

#: Tasks that run at a time.
AT_ONCE = 24


@dataclass(slots=True)
class Comparison:
    """How many choices came out the same, token for token, of greedy and of sampled tasks."""

    equal: dict[str, int] = field(default_factory=lambda: {"greedy": 0, "sampled": 0})
    total: dict[str, int] = field(default_factory=lambda: {"greedy": 0, "sampled": 0})
    different: list[dict[str, Any]] = field(default_factory=list)
    """Of each choice that came out otherwise: its task, and the index of the first token that differs."""

    def add(self, task: Followed, choice: int, interrupted: tuple[int, ...], smooth: tuple[int, ...]) -> None:
        kind = "greedy" if task.greedy else "sampled"
        self.total[kind] += 1
        if interrupted == smooth:
            self.equal[kind] += 1
            return
        pairs = zip(interrupted, smooth, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(interrupted), len(smooth)))
        lengths = [len(interrupted), len(smooth)]
        self.different.append({"task": task.number, "kind": kind, "choice": choice, "first": at, "lengths": lengths})

    def report(self) -> dict[str, Any]:
        return {"equal": self.equal, "total": self.total, "different": self.different}

    def __str__(self) -> str:
        return ", ".join(f"{self.equal[kind]} of {self.total[kind]} {kind} choices equal" for kind in self.total)


def compare(url: str, seed: int, model: str, longest: int, followed: list[Followed]) -> Comparison:
    """Runs the tasks on the workers that are there."""
    return asyncio.run(_compare(url, seed, model, longest, followed))


async def _compare(url: str, seed: int, model: str, longest: int, followed: list[Followed]) -> Comparison:
    found = Comparison()
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(url) as client:

        async def once_more(task: Followed) -> None:
            async with room:
                handle = await client.submit(**task_of(seed, task.number, model, longest))
                result = await handle.result(timeout=300)
            for choice in result.choices:
                tokens = [e for _, e in task.received if isinstance(e, Token) and e.choice == choice.index]
                found.add(task, choice.index, tuple(token.token_id for token in tokens), choice.token_ids)

        await asyncio.gather(*map(once_more, followed))
    return found
