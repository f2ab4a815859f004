"""Measures latency against load: requests arrive at random, at several rates in turn.

    python -m engine.bench --model DIR --load --mix chat,prefix,long,tiers --rates 0.5,1,2,4 --json OUT

Arrivals are a Poisson process, the same in every run with one seed. Mixes: `chat` (128 prompt and 64 output tokens),
`prefix` (prompts that share 400 tokens and have 32 of their own), `long` (1,500 prompt and 32 output tokens), `tiers`
(like chat; one of five requests has the priority tier, one the batch tier). For each rate it prints the time to the
first token, from arrival, and the time between tokens, both at the 50th, 95th and 99th percentile. It also prints the
output tokens a second until the last request has ended.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Engine, EngineConfig, Event, Request
from engine.params import greedy
from engine.request import Tier

_PERCENTILES = (50, 95, 99)
#: The shared and own prompt tokens of the prefix mix.
_SHARED, _UNSHARED = 400, 32
#: The tokens of prompt and output of each mix.
_SHAPES = {"chat": (128, 64), "prefix": (_SHARED + _UNSHARED, 32), "long": (1500, 32), "tiers": (128, 64)}
MIXES = tuple(_SHAPES)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """The time of arrival, in seconds from the beginning of the run."""
    prompt: list[int]
    output: int
    tier: Tier = Tier.DEFAULT


@dataclass(slots=True)
class TokenTimes:
    """The times of a request's tokens, in seconds after its arrival."""

    tier: Tier
    times: list[float]


def arrivals(mix: str, rate: float, count: int, vocab_size: int, seed: int) -> list[Arrival]:
    """Make `count` requests, on average `rate` a second."""
    random_ = random.Random(f"{seed}:{mix}:{rate}")  # noqa: S311  # data, not secrets

    def ids(number: int) -> list[int]:
        return [random_.randrange(vocab_size) for _ in range(number)]

    shared = ids(_SHARED)
    prompt, output = _SHAPES[mix]
    plan, at = [], 0.0
    for _ in range(count):
        at += random_.expovariate(rate)
        tier = random_.choice([Tier.PRIORITY, *[Tier.DEFAULT] * 3, Tier.BATCH]) if mix == "tiers" else Tier.DEFAULT
        plan.append(Arrival(at, shared + ids(_UNSHARED) if mix == "prefix" else ids(prompt), output, tier))
    return plan


def longest_of(mix: str) -> int:
    """The tokens of a mix's longest request, prompt and output."""
    return sum(_SHAPES[mix])


def serve(
    engine: Engine,
    plan: Sequence[Arrival],
    name: str,
    observe: Callable[[int, Event], None] = lambda i, event: None,
) -> tuple[list[TokenTimes], float]:
    """Run requests at their times. Returns each one's token times and the seconds of the whole run.

    `observe`: called on the engine's thread with the request's index in the plan and each event. Raises RuntimeError if
    a request failed.
    """
    times = [TokenTimes(arrival.tier, []) for arrival in plan]
    done, errors = threading.Semaphore(0), []
    began = time.monotonic()

    def listener(i: int, due: float) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            times[i].times += [time.monotonic() - due] * len(event.token_ids)
            observe(i, event)
            if event.error is not None:
                errors.append(event.error)
            if event.done:
                done.release()

        return on_event

    for i, arrival in enumerate(plan):
        due = began + arrival.at
        if (early := due - time.monotonic()) > 0:
            time.sleep(early)
        params = greedy(arrival.output)
        engine.submit(Request(f"{name}-{i}", arrival.prompt, params, tier=arrival.tier), listener(i, due))
    for _ in plan:
        done.acquire()
    if errors:
        raise RuntimeError(errors[0])
    return times, time.monotonic() - began


def figures(times: Sequence[TokenTimes], seconds: float) -> dict[str, Any]:
    """The figures of one rate, with latencies in milliseconds."""
    first = [request.times[0] for request in times]
    gaps = [
        after - before for request in times for before, after in zip(request.times, request.times[1:], strict=False)
    ]
    results: dict[str, Any] = {
        "requests": len(times),
        "output_tokens_per_s": sum(len(request.times) for request in times) / seconds,
        "ttft_ms": percentiles(first),
        "itl_ms": percentiles(gaps),
    }
    by_tier: dict[str, list[float]] = defaultdict(list)
    for request in times:
        by_tier[request.tier.name.lower()].append(request.times[0])
    if len(by_tier) > 1:
        results["ttft_ms_by_tier"] = {tier: percentiles(first_times) for tier, first_times in sorted(by_tier.items())}
    return results


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The percentiles by nearest rank, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{p}": 1e3 * ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in _PERCENTILES} if ordered else {}


def bench_load(args: argparse.Namespace, config: EngineConfig, vocab_size: int) -> dict[str, Any]:
    """Run all mixes at all rates, with a fresh engine for each mix."""
    results: dict[str, Any] = {}
    for mix in args.mix:
        rates: list[dict[str, Any]] = []
        with Engine.load(args.model, config) as engine:
            serve(engine, arrivals(mix, 1e3, 2, vocab_size, args.seed + 1), f"{mix}-warm-up")
            for rate in args.rates:
                plan = arrivals(mix, rate, args.requests, vocab_size, args.seed)
                result = {"rate": rate, "load_average": os.getloadavg()[0]} | figures(
                    *serve(engine, plan, f"{mix}-{rate}")
                )
                rates.append(result)
                print(shown(mix, result), flush=True)
        results[mix] = rates
    return results


def shown(mix: str, result: dict[str, Any]) -> str:
    parts = [f"{mix:7} {result['rate']:6g} requests/s  {result['output_tokens_per_s']:8.1f} output tokens/s"]
    for metric in ("ttft", "itl"):
        parts.append(f"{metric.upper()} ms " + " ".join(f"{p} {ms:.1f}" for p, ms in result[f"{metric}_ms"].items()))
    for tier, first_times in result.get("ttft_ms_by_tier", {}).items():
        parts.append(f"{tier} p95 {first_times['p95']:.1f}")
    return "   ".join(parts)
