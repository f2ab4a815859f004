"""A bench's requests and their times: a pure function of its settings and a seed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its due time (s after the start; 0 in a closed loop) and its task."""

    number: int
    due: float
    task: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """A load's settings. Lengths are tokens. `prompts` replace random prompts."""

    model: str
    vocab_size: int
    requests: int
    rate: float | None = None
    """Arrivals a second in an open loop. None: a closed loop, where each end of a request starts the next."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of times between arrivals: 1 is Poisson, less makes bursts."""
    prompt_tokens: int = 128
    output_tokens: int = 64
    spread: float = 0.0
    """Lengths vary uniformly by up to this share, either way."""
    shared_prefix: int = 0
    """Number of tokens that all random prompts begin with."""
    prompts: Sequence[Mapping[str, Any]] = ()
    tiers: Mapping[str, float] = field(default_factory=lambda: {"default": 1.0})
    """Tier -> weight."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every task."""
    seed: int = 0

    def asks(self) -> Iterator[Ask]:
        """The requests, in order of time."""
        # Separate random streams: prompts do not depend on the rate, nor times on the prompts.
        arrivals, lengths = random.Random(f"{self.seed} arrivals"), random.Random(f"{self.seed} lengths")  # noqa: S311
        tiers = random.Random(f"{self.seed} tiers")  # noqa: S311 - it picks, it guards nothing
        prompts, due = self._prompts(), 0.0
        for number in range(self.requests):
            if self.rate is not None:
                due += arrivals.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            output = _length(lengths, self.output_tokens, self.spread)
            (tier,) = tiers.choices(list(self.tiers), list(self.tiers.values()))
            task = {"model": self.model, "max_tokens": output, "tier": tier, "seed": number, **self.extra}
            if not self.prompts:
                # Ignoring EOS gives outputs of exactly the asked length.
                task["ignore_eos"] = True
            yield Ask(number, due, {**task, **next(prompts)})

    def _prompts(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(f"{self.seed} prompts")  # noqa: S311
        if self.prompts:
            order = list(self.prompts)
            rng.shuffle(order)
            yield from (dict(prompt) for prompt in itertools.cycle(order))
        prefix = rng.choices(range(self.vocab_size), k=self.shared_prefix)
        while True:
            length = _length(rng, self.prompt_tokens, self.spread)
            yield {"prompt": [*prefix, *rng.choices(range(self.vocab_size), k=length)][:length]}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a file of prompts: one text a line, or one JSON object a line with `prompt` and optionally `max_tokens`.

    Raises ValueError, which names the line, and OSError.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        entry: Any = {"prompt": line}
        if line.startswith("{"):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
        if not entry.get("prompt") or not entry.keys() <= {"prompt", "max_tokens"}:
            raise ValueError(f"{path}, line {number}: an object has `prompt` and may have `max_tokens`, nothing else")
        prompts.append(entry)
    if not prompts:
        raise ValueError(f"{path} has no prompt")
    return prompts


def _length(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))
