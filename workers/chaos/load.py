"""What a run asks for: everything about a task is a function of the run's seed and the task's number.

A task's **variant** says what it generates (prompt, parameters, seed), so that the same can be generated in quiet and
compared; its **manner** says how it is asked for and read, and what becomes of it on the way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TIERS: Final = ("priority", "default", "default", "flex", "batch")
#: The list that links are sent to.
LINKS: Final = "penstock-chaos-links"
#: Beginnings to go on from.
PROMPTS: Final = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "import os\nimport sys\n\n\ndef main():\n    path = ",
    "    for line in lines:\n        name, _, value = line.partition(':')\n        ",
    'def read(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n        ',
    "try:\n    number = int(text)\nexcept ValueError:\n    ",
    "Once upon a time there was a ",
    "async def fetch(session, url):\n    async with session.get(url) as response:\n        ",
)
#: Share of tasks that are asked for in each way.
WAYS: Final[Mapping[str, float]] = {"http": 5.0, "redis": 3.0, "poll": 2.0, "celery": 2.0, "waiting": 1.0}


@dataclass(frozen=True, slots=True)
class Load:
    """`longest` output in tokens; `variants` that there are; `ways` of WAYS that are used; `ids`: of prompts as token
    ids below this number, for an engine without a tokenizer."""

    seed: int
    model: str
    variants: int
    longest: int
    ways: tuple[str, ...] = tuple(WAYS)
    ids: int | None = None
    early: float = 0.3
    """Share of tasks that are cancelled, or have a deadline that they may miss, or a reader who leaves and returns."""

    def task(self, variant: int) -> dict[str, Any]:
        """The fields that say what is generated."""
        rng = random.Random(f"{self.seed} variant {variant}")  # noqa: S311
        task: dict[str, Any] = {
            "model": self.model,
            "prompt": self._prompt(rng),
            "max_tokens": min(self.longest, 4 + int(rng.expovariate(3 / self.longest))),
            "n": rng.choice((1, 1, 1, 2)),
            "seed": rng.getrandbits(31),
            "ignore_eos": rng.random() < 0.5,
            "temperature": 0.0,
        }
        if rng.random() < 0.5:
            task |= {"temperature": 0.8, "top_p": 0.95, "top_k": rng.choice((0, 50))}
        return task

    def _prompt(self, rng: random.Random) -> str | list[int]:
        if self.ids is not None:
            return [rng.randrange(1, self.ids) for _ in range(rng.randint(1, 40))]
        text = rng.choice(PROMPTS)
        return text[: rng.randint(8, len(text))]

    def manner(self, number: int) -> Manner:
        """How a task is asked for."""
        rng = random.Random(f"{self.seed} manner {number}")  # noqa: S311
        (via,) = rng.choices(self.ways, [WAYS[way] for way in self.ways])
        what = rng.random() / self.early if self.early else 1.0
        return Manner(
            number,
            number % self.variants,
            via,
            tier=rng.choice(TIERS),
            cancel_after=round(rng.expovariate(1.0), 2) if what < 0.3 else None,
            timeout=round(rng.uniform(0.3, 4.0), 2) if 0.3 <= what < 0.5 else None,
            leaves_after=rng.randint(1, 40) if 0.5 <= what < 1.0 else None,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """`cancel_after` and `timeout`: s; `leaves_after`: entries that a reader takes before it leaves, and comes back."""

    number: int
    variant: int
    via: str
    tier: str = "default"
    cancel_after: float | None = None
    timeout: float | None = None
    leaves_after: int | None = None


def quiet(variants: Sequence[int]) -> list[Manner]:
    """Each variant once, and nothing happens to it."""
    return [Manner(variant, variant, "http") for variant in variants]
