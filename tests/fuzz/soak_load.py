"""A mixed load in rounds: good requests, some of which are left or cancelled, among fuzzed ones and fuzzed messages."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from contextlib import aclosing

import httpx
from redis import Redis

from producers import AsyncClient
from producers.broker.redis.calls import lists
from producers.contract import keys
from producers.errors import PenstockError
from tests.fuzz.drawing import drawn
from tests.fuzz.ends import Ends
from tests.fuzz.messages import messages
from tests.fuzz.on_http import Findings, call
from tests.fuzz.requests import Route, visits
from tests.processes import queues_of

PROMPTS = ("def f(", "import os\n\ndef read(path):\n    ", "class Queue:\n", "x", "for i in range(10):\n" * 20)


class SoakLoad:
    """`round` is one helping of everything; `counts` says what came of it, `faults` what may not be."""

    def __init__(
        self, url: str, port: int, model: str, known: tuple[Route, ...], ids: list[bytes], start: int, drawn_: int
    ) -> None:
        self._url, self._port, self._model = url, port, model
        self._rng = random.Random(start)
        # Drawn before, and come round again: what is measured is not to wait for what draws.
        self._visits = itertools.cycle(list(drawn(visits(known, model, ids), drawn_, start)))
        self._messages = itertools.cycle(list(drawn(messages(model), drawn_, start)))
        self._redis = Redis.from_url(url)
        self._lists = [name for name, _ in lists(queues_of(self._redis, model))]
        self.ends = Ends(self._redis, self._lists)
        self._serial = 0
        self.counts: Counter[str] = Counter()
        self.found = Findings(start)

    @property
    def faults(self) -> list[str]:
        return self.found.faults

    async def round(self, seconds: float, each: int) -> None:
        """About `each` of every kind, spread over these seconds; returns when all have ended or were left."""
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=300) as http,
            AsyncClient(self._url) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(each):
                group.create_task(self._chat(http))
                group.create_task(self._task(client))
                group.create_task(call(self._port, [next(self._visits)], self.found))
                self._message()
                self._message()
                await asyncio.sleep(seconds / each)

    async def _chat(self, http: httpx.AsyncClient) -> None:
        """On the connection; a third leave in the midst of it."""
        rng = self._rng
        leaves = rng.randint(0, 12) if rng.random() < 0.35 else None
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
            "max_tokens": rng.randint(1, 40),
            "stream": True,
            "n": rng.choice((1, 1, 2)),
            "service_tier": rng.choice(("default", "flex", "priority")),
        }
        last = ""
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                self.faults.append(f"a good chat was answered {answer.status_code}: {(await answer.aread())[:500]!r}")
                return
            async for line in answer.aiter_lines():
                last = line or last
                if leaves is not None and (leaves := leaves - 1) < 0:
                    self.counts["chats left"] += 1
                    return
        if last != "data: [DONE]":
            self.faults.append(f"a good chat ended with {last[:500]}")
        self.counts["chats"] += 1

    async def _task(self, client: AsyncClient) -> None:
        """Through the client library; a third are cancelled, a third of the streams are left."""
        rng = self._rng
        fields = {
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.randint(1, 60),
            "n": rng.choice((1, 1, 3)),
            "ttl": 60,
        }
        leaves = rng.randint(1, 20) if rng.random() < 0.3 else None
        cancels = rng.random() < 0.3
        try:
            handle = await client.submit(model=self._model, tier=rng.choice(list(keys.TIERS)), **fields)
            if cancels:
                await asyncio.sleep(rng.random() * 0.2)
                await handle.cancel()
            async with aclosing(handle.stream()) as stream:
                async for _ in stream:
                    if leaves is not None and (leaves := leaves - 1) == 0:
                        self.counts["streams left"] += 1
                        return
            status = (await handle.status()).status
            if status not in (("completed", "cancelled") if cancels else ("completed",)):
                self.faults.append(f"a good task ended {status}")
            self.counts[f"tasks {status}"] += 1
        except PenstockError as error:
            self.faults.append(f"a good task failed: {error!r}")

    def _message(self) -> None:
        self._serial += 1
        fuzzed = next(self._messages).named(f"soak-{self._serial}")
        self._redis.lpush(self._lists[fuzzed.place % len(self._lists)], fuzzed.raw)
        self.counts["fuzzed messages"] += 1

    def close(self) -> None:
        self._redis.close()
