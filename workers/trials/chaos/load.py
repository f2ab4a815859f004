"""The tasks of a run: everything about a task is a function of the run's seed and the task's number.

A task's **variant** is what it generates (prompt, parameters, seed). The same variant is generated again without
faults, and the outputs are compared. A task's **manner** is how it is submitted, read, cancelled or left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

TIERS: Final = ("priority", "default", "default", "flex", "batch")
#: The list that receives the Celery links of plain tasks.
LINKS: Final = "penstock-chaos-links"
#: Prompts, which variants cut at random lengths.
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
#: Way of submitting and reading -> its weight among tasks.
WAYS: Final[Mapping[str, float]] = {"http": 5.0, "redis": 3.0, "poll": 2.0, "celery": 2.0, "waiting": 1.0}
#: Without plain Celery messages, whose queue and links a broker other than Redis need not have.
WITHOUT_CELERY: Final = tuple(name for name in WAYS if name != "celery")


@dataclass(frozen=True, slots=True)
class Load:
    """Settings of a run's tasks.

    `variants`: number of variants. `longest`: longest output in tokens. `ways`: the WAYS to use. `ids`: for an engine
    without a tokenizer, prompts are token ids below this number.
    """

    seed: int
    model: str
    variants: int
    longest: int
    ways: tuple[str, ...] = tuple(WAYS)
    ids: int | None = None
    early: float = 0.3
    """Share of tasks that are cancelled, have a short deadline, or have a reader that leaves and returns."""

    def task(self, variant: int) -> dict[str, Any]:
        """The task fields of a variant."""
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
        """The manner of task `number`."""
        rng = random.Random(f"{self.seed} manner {number}")  # noqa: S311
        (via,) = rng.choices(self.ways, [WAYS[name] for name in self.ways])
        share = rng.random() / self.early if self.early else 1.0
        return Manner(
            number,
            number % self.variants,
            via,
            tier=rng.choice(TIERS),
            cancel_after=round(rng.expovariate(1.0), 2) if share < 0.3 else None,
            timeout=round(rng.uniform(0.3, 4.0), 2) if 0.3 <= share < 0.5 else None,
            leaves_after=rng.randint(1, 40) if 0.5 <= share < 1.0 else None,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """The handling of one task.

    `cancel_after`, `timeout`: seconds. `leaves_after`: entries after which a reader leaves; it comes back later.
    """

    number: int
    variant: int
    via: str
    tier: str = "default"
    cancel_after: float | None = None
    timeout: float | None = None
    leaves_after: int | None = None


def quiet(variants: Sequence[int]) -> list[Manner]:
    """The manners of a run without faults: each variant once, with nothing done to it."""
    return [Manner(variant, variant, "http") for variant in variants]
