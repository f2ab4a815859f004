"""Placement by prefix on real workers under load: `python -m tests.bench.placed`.

Three systems (`penstock up`) of a real model on this machine, each with a server of its own: two workers without
placement, two with `--placement prefix`, and one with as many threads and as large a cache as both. Conversations of
some turns, each with texts of its own, come to one system after another, in rounds: so all have the machine's other
work alike. Measured: prompt tokens that a cache had, of those of second and later turns; the time to the first token;
and the time of a whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.rolled import System
from workers.trials.bench.connection import Connections

WORDS = ("river", "engine", "letter", "garden", "window", "market", "signal", "copper", "winter", "bridge", "orange")
#: Words of a conversation's first text, and of each further one; tokens of an answer.
FIRST, NEXT, TOKENS = 150, 20, 12
#: Threads and bytes of the KV cache of each of two workers.
THREADS, KV = 1, 512 << 20
#: Mean time (s) between an answer and the next turn.
THINKS_S = 0.5


@dataclass(slots=True)
class Figures:
    """Of one system: tokens of second and later turns' prompts, cached ones among them, and times (s)."""

    prompt: int = 0
    cached: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def of(self, one: Figures) -> dict[str, Any]:
        """As JSON; cached tokens also as a share of those of `one`."""
        cached = self.cached / self.prompt
        times = {"first_token": sorted(self.first), "answer": sorted(self.whole)}
        quantiles = {
            f"{name}_{quantile}_ms": round(1000 * values[len(values) * quantile // 100])
            for name, values in times.items()
            for quantile in (50, 95)
        }
        of_one = round(cached / (one.cached / one.prompt), 3)
        return {"turns": len(self.first), "cached": round(cached, 3), "of_one": of_one, **quantiles}


async def _turn(connections: Connections, model: str, messages: list[dict[str, str]], figures: Figures) -> str:
    """One answer, as a stream."""
    body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    async with connections.request("POST", "/v1/chat/completions", body) as answer:
        if answer.status != 200:
            raise SystemExit((await answer.whole()).decode())
        async for events in answer.events():
            for event in events:
                chunk = {} if event.data == "[DONE]" else json.loads(event.data)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    if said := choice["delta"].get("content"):
                        first, text = first or time.monotonic() - began, text + said
    figures.whole.append(time.monotonic() - began)
    figures.first.append(first or figures.whole[-1])
    if len(messages) > 1:
        figures.prompt += usage["prompt_tokens"]
        figures.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return text


async def _round(url: str, model: str, figures: Figures, conversations: int, turns: int, seed: int) -> None:
    connections = Connections(url)

    async def talk(number: int) -> None:
        rng = random.Random(1000 * seed + number)
        await asyncio.sleep(rng.expovariate(1 / THINKS_S))
        messages = list[dict[str, str]]()
        for turn in range(turns):
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=NEXT if turn else FIRST))})
            text = await _turn(connections, model, messages, figures)
            messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(rng.expovariate(1 / THINKS_S))

    await asyncio.gather(*(talk(number) for number in range(conversations)))
    connections.close()


def measure(model: str, rounds: int, conversations: int, turns: int) -> dict[str, Any]:
    two = "--workers", "2", "--threads", str(THREADS), "--kv-cache-bytes", str(KV)
    options = {
        "off": two,
        "prefix": (*two, "--placement", "prefix"),
        "one": ("--workers", "1", "--threads", str(2 * THREADS), "--kv-cache-bytes", str(2 * KV)),
    }
    with ExitStack() as stack:
        systems = dict[str, System]()
        for name, values in options.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            systems[name] = System(folder, "--model", model, *values)
            stack.callback(systems[name].stop)

        async def run() -> dict[str, Figures]:
            figures = {name: Figures() for name in systems}
            for number in range(-1, rounds):
                for name, system in systems.items():
                    counted = Figures() if number < 0 else figures[name]  # the first one warms up
                    await _round(system.url, model, counted, conversations, turns, number)
            return figures

        figures = asyncio.run(run())
    return {name: of.of(figures["one"]) for name, of in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=6, help="at a time, of each round")
    parser.add_argument("--turns", type=int, default=5, help="at least 2: what a first turn has was never computed")
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns is less than 2: only second and later turns can have tokens in a cache")
    for name, figures in measure(**vars(arguments)).items():
        print(json.dumps({"system": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
