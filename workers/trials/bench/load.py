"""A bench's requests, and sending them: records when their tokens arrived.

The requests and their times are a pure function of the load's settings and a seed. Each submits a task and follows its
stream, over one connection if the server allows. In an open loop a request is due at its time, whatever became of
earlier ones. Its latency counts from then, also if the limit on concurrency or the client itself delays it. Otherwise a
slow server would look fast by slowing down its client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from workers.trials.bench.connection import Broken, Connections

#: Interval (s) at which the client measures its event loop's lag.
LOOK_S: Final = 0.02
#: Time limit (s) for cancelling open tasks when the bench is stopped.
CANCEL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Request:
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

    def schedule(self) -> Iterator[Request]:
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
                # Ignoring EOS gives outputs of exactly the requested length.
                task["ignore_eos"] = True
            yield Request(number, due, {**task, **next(prompts)})

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
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds since the start of the bench."""

    number: int
    tier: str
    due: float
    """The time at which it should have been sent."""
    sent: float = 0.0
    tokens: array[float] = field(default_factory=lambda: array("d"))
    """Arrival times of the tokens."""
    ended: float = 0.0
    error: str | None = None
    """None: the request completed."""
    task_id: str = ""
    queue_wait: float | None = None
    """Seconds from its record to the start of its run, by the store's clock."""
    prompt_tokens: int = 0


@dataclass(slots=True)
class Client:
    """The client's own cost."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    lags: array[float] = field(default_factory=lambda: array("d"))
    """Measured lags of the event loop (s)."""


async def drive(
    url: str,
    requests: Iterable[Request],
    *,
    concurrency: int | None,
    silence: float = 60.0,
    note: Callable[[Sample], None] = lambda sample: None,
    duration: float | None = None,
) -> tuple[list[Sample], Client]:
    """Send `requests` for at most `duration` seconds, at most `concurrency` at a time.

    Returns the samples and the client's cost. `note` gets each ended sample. A request without data for `silence`
    seconds has failed. When cancelled, this cancels the open tasks.
    """
    run = _Run(Connections(url), silence, note)
    client, cpu = Client(), time.process_time()
    looking = asyncio.create_task(_look(client))
    try:
        await run.send(requests, concurrency, duration)
        client.wall_s, client.cpu_s = run.now(), time.process_time() - cpu
        await run.look_up()
    except asyncio.CancelledError:
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await run.cancel()
        raise
    finally:
        looking.cancel()
        for request in run.going:
            request.cancel()
        run.connections.close()
    return run.samples, client


@dataclass(slots=True)
class _Run:
    connections: Connections
    silence: float
    note: Callable[[Sample], None]
    samples: list[Sample] = field(init=False, default_factory=list)
    going: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _start: float = field(init=False, default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def send(self, requests: Iterable[Request], concurrency: int | None, duration: float | None) -> None:
        """Send each when it is due and there is room, and follow all to their ends."""
        slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        for request in requests:
            if duration is not None and max(request.due, self.now()) >= duration:
                break
            if request.due > self.now():
                await asyncio.sleep(request.due - self.now())
            if slots is not None:
                await slots.acquire()
                if duration is not None and self.now() >= duration:
                    break
            following = self._begin(request)
            if slots is not None:
                following.add_done_callback(lambda _: slots.release())
        while self.going:
            await asyncio.wait(self.going)

    def _begin(self, request: Request) -> asyncio.Task[None]:
        sample = Sample(request.number, str(request.task["tier"]), request.due or self.now())
        self.samples.append(sample)
        following = asyncio.create_task(self._run_request(sample, request.task))
        self.going.add(following)
        following.add_done_callback(self.going.discard)
        return following

    async def _run_request(self, sample: Sample, task: dict[str, Any]) -> None:
        sample.sent = self.now()
        try:
            async with asyncio.timeout(self.silence):
                async with self.connections.request("POST", "/v1/tasks", task) as answer:
                    created = await answer.json()
                if answer.status != 202:
                    raise Broken(f"{answer.status} {created.get('error', {}).get('code') or 'error'}")
                sample.task_id = created["id"]
            await self._follow(sample)
        except TimeoutError:
            sample.error = "silence"
        except (Broken, KeyError, AttributeError, ValueError) as error:
            sample.error = " ".join(str(error).split())[:100] or type(error).__name__
        sample.ended = self.now()
        self.note(sample)

    async def _follow(self, sample: Sample) -> None:
        async with (
            asyncio.timeout(self.silence) as patience,
            self.connections.request("GET", f"/v1/tasks/{sample.task_id}/events") as answer,
        ):
            if answer.status != 200:
                raise Broken(f"{answer.status} for the stream")
            end: dict[str, Any] = {}
            async for events in answer.events():
                at = self.now()
                patience.reschedule(asyncio.get_running_loop().time() + self.silence)
                for event in events:
                    # A token's JSON is not parsed: only its arrival counts.
                    if event.kind == "token":
                        sample.tokens.append(at)
                    elif event.kind in ("end", "error"):
                        end = json.loads(event.data)
            sample.prompt_tokens = (end.get("usage") or {}).get("prompt_tokens", 0)
            if end.get("status") not in ("completed", "incomplete"):
                failure = (end.get("error") or {}).get("code") or end.get("status") or "the stream broke off"
                raise Broken(str(failure))

    async def look_up(self) -> None:
        """Set each sample's queue wait. It runs after the load, so that it adds nothing to it."""
        slots = asyncio.Semaphore(16)

        async def look_up_one(sample: Sample) -> None:
            async with slots:
                with suppress(Broken, KeyError, TypeError, TimeoutError):
                    async with (
                        asyncio.timeout(self.silence),
                        self.connections.request("GET", f"/v1/tasks/{sample.task_id}") as answer,
                    ):
                        record = await answer.json()
                        sample.queue_wait = record["started_at"] - record["created_at"]

        await asyncio.gather(*(look_up_one(sample) for sample in self.samples if sample.task_id))

    async def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        for sample in self.samples:
            if sample.task_id and not sample.ended:
                with suppress(Broken):
                    async with self.connections.request("POST", f"/v1/tasks/{sample.task_id}/cancel") as answer:
                        await answer.json()


async def _look(client: Client) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LOOK_S)
        client.lags.append(time.perf_counter() - before - LOOK_S)
