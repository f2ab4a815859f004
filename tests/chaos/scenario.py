"""The tasks that one worker runs while it is struck, and what must be true of them in the end.

One of each kind: a plain one of the client library, several choices, a Celery message with a link, one that the engine
fails once (so that Celery's retry sends it again), one cancelled in the midst, one cancelled before any worker was up,
one that is told how likely its prompt was, one that wants nothing else, one that takes the best two of four choices.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery
from redis import Redis

from producers import Client
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import protocol
from tests.chaos.calls import Call, sources
from tests.chaos.streams import Stored
from tests.stub_engine import load, logprob, prompt_logprob, text_of, token
from workers.runtime.worker import announce

LINKS = "links"
#: What the worker needs to know of the scenario.
ENV = {"STUB_FAULTS": "1", "STUB_FAULT_SEEDS": "5"}

_LENGTHS = {"plain": 5, "choices": 4, "linked": 4, "endless": 3000, "retried": 4, "unwanted": 4}
_LENGTHS |= {"scored": 3, "prompt": 0, "best": 3}
_PROMPT = [1, 2, 3]
_BEST_OF = 4
_SEEDS = {name: seed for seed, name in enumerate(_LENGTHS, 1)}
#: In the midst: when the worker says APPEND for this time.
_MIDST = 3


class Scenario:
    """On a server of its own: the broker is its database 0, the store its database 1."""

    def __init__(self, port: int) -> None:
        self.broker = Redis(port=port, db=0, decode_responses=True)
        self.store = Redis(port=port, db=1, decode_responses=True)
        self._client = Client(f"redis://127.0.0.1:{port}/0", f"redis://127.0.0.1:{port}/1")
        self._sender = Celery("sender", broker=f"redis://127.0.0.1:{port}/0", set_as_current=False)
        self._queue = ""
        self._appends = 0
        self._in_the_midst: Callable[[], None] = self.cancel
        self._cancelled = threading.Event()
        self.ids: dict[str, str] = {}

    def begin(self, in_the_midst: Callable[[], None] | None = None) -> None:
        """Empty the server and queue the tasks. `in_the_midst`: what is done instead of cancelling the endless one."""
        self.broker.flushall()
        for script in sources():
            self.store.script_load(script.text)
        engine, files = load("stub", {})
        _, self._queue = announce(self.store, engine, files)
        engine.close()
        self._appends = 0
        self._in_the_midst = in_the_midst or self.cancel
        self._cancelled.clear()
        self.ids = {
            "plain": self._submit("plain", tier="priority"),
            "choices": self._submit("choices", n=2, tier="flex"),
            "linked": self._sender.send_task(
                keys.TASK_NAME,
                kwargs={"prompt": [1, 2], "max_tokens": _LENGTHS["linked"], "seed": _SEEDS["linked"]},
                queue=keys.model_queue("stub"),
                link=self._sender.signature("tests.note", queue=LINKS, immutable=True),
            ).id,
            "endless": self._submit("endless"),
            "retried": self._submit("retried"),
            "unwanted": self._submit("unwanted", tier="batch"),
            "scored": self._submit("scored", prompt_logprobs=2),
            "prompt": self._submit("prompt", prompt_logprobs=0),
            "best": self._submit("best", n=2, best_of=_BEST_OF),
        }
        self._client.get(self.ids["unwanted"]).cancel()

    def _submit(self, name: str, **task: Any) -> str:
        length, seed = _LENGTHS[name], _SEEDS[name]
        return self._client.submit(model="stub", prompt=_PROMPT, max_tokens=length, seed=seed, **task).id

    def watch(self, call: Call) -> None:
        """What the worker is about to say."""
        if call.kind == "APPEND":
            self._appends += 1
            if self._appends == _MIDST:
                self._in_the_midst()

    def cancel(self) -> None:
        """Cancel the endless task, if that was not done before."""
        if not self._cancelled.is_set():
            self._cancelled.set()
            accepted, _ = run(self.store, protocol.cancel(self.ids["endless"]))
            assert accepted, "it never ends by itself"

    # ---- how it goes ------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Every task is settled, and no message is left, wherever it may be."""
        pipe = self.store.pipeline(transaction=False)
        for task_id in self.ids.values():
            pipe.hexists(keys.task(task_id), "settled")
        return all(pipe.execute()) and not self._messages()

    def _messages(self) -> list[str]:
        """Keys that hold messages: lists, deliveries, what is delayed."""
        kinds = ("penstock:queue:", "penstock:inflight:", "penstock:delayed:")
        return [name for name in _keys(self.broker, "penstock:*") if name.startswith(kinds)]

    def leases(self) -> list[str]:
        """Incarnations that have a lease on the broker or the store, or are in the broker's books."""
        found = set(self._incarnations())
        for server in (self.broker, self.store):
            found |= {name.removeprefix(keys.lease("")) for name in _keys(server, keys.lease("*"))}
        return sorted(found)

    def _incarnations(self, worker: str = "") -> list[str]:
        return [name for name in map(text, self.broker.hkeys(broker_keys.INCARNATIONS)) if name.startswith(worker)]

    def lapse(self, server: Redis, worker: str) -> None:
        """As if the time of the worker's leases were over."""
        for name in _keys(server, keys.lease(f"{worker}.*")):
            server.delete(name)

    def refetched(self) -> bool:
        """A worker called `second` has deliveries in its hands, or has no need to."""
        return (
            any(self.broker.exists(broker_keys.inflight(name)) for name in self._incarnations("second.")) or self.done()
        )

    def bury(self, worker: str) -> None:
        """Take a dead worker that held nothing off the books, as the next one would."""
        self.lapse(self.broker, worker)
        self.lapse(self.store, worker)
        for name in self._incarnations(f"{worker}."):
            self.broker.hdel(broker_keys.INCARNATIONS, name)

    # ---- how it must end --------------------------------------------------------------------------------------

    def faults(self, kills: int, links: range) -> list[str]:
        """What is wrong, once everything is done and all workers are gone."""
        found: list[str] = []
        for name, task_id in self.ids.items():
            stored = Stored.read(self.store, task_id)
            cancelled = name in ("endless", "unwanted")
            found += stored.faults(("cancelled",) if cancelled else ("completed",), kills)
            wanted = _prompt_entries() if name in ("scored", "prompt") else []
            if stored.prompt != wanted:
                found.append(f"task {task_id} ({name}) has {stored.prompt} before its tokens, not {wanted}")
            made = _best(_SEEDS[name], _LENGTHS[name]) if name == "best" else range(len(stored.tokens))
            for choice, tokens in zip(made, stored.tokens, strict=False):
                true = [token(_SEEDS[name], choice, index) for index in range(_LENGTHS[name])]
                if tokens != (true[: len(tokens)] if cancelled else true):
                    found.append(f"task {task_id} ({name}) has tokens {tokens}, not {true}")
        found += self._celery_faults(links)
        if dead := self.broker.lrange(broker_keys.DEAD, 0, -1):
            found.append(f"dead letters: {dead!r}")
        return found + [f"left behind: {name}" for name in self._litter()]

    def _celery_faults(self, links: range) -> list[str]:
        found = []
        told = json.loads(self.store.get(f"celery-task-meta-{self.ids['linked']}") or b"{}")
        if told.get("status") != "SUCCESS" or told["result"]["text"] != text_of(
            _SEEDS["linked"], 0, _LENGTHS["linked"]
        ):
            found.append(f"the result backend says {told} of the linked task")
        if self.broker.llen(LINKS) not in links:
            found.append(f"the link was sent {self.broker.llen(LINKS)} times; it should be {links}")
        return found

    def _litter(self) -> list[str]:
        """Keys that should not be there any more."""
        stays: tuple[str, ...] = (
            LINKS,
            "_kombu.",
            "penstock:deliveries",
            "penstock:task:",
            "penstock:stream:",
            "celery-task-meta-",
        )
        stays += (keys.MODELS, keys.VERSIONS, keys.PROFILES, keys.workers(""), keys.POOLS, keys.SETTLED, keys.TASKS)
        stays += (
            keys.LEDGER,
            keys.REQUESTS,
            keys.drain(""),
            keys.kept(""),
            keys.WAITING_MEMORY,
            keys.JOINS,
            broker_keys.ARRIVALS,
        )
        stays += (keys.metrics(""), keys.metrics_mark(""))
        names = _keys(self.broker, "*") + _keys(self.store, "*")
        return [name for name in names if not name.startswith(stays)]

    def close(self) -> None:
        self._client.close()
        self._sender.close()


def _prompt_entries() -> list[Any]:
    """What stands in the stream of a task that asked how likely its prompt was."""
    logprobs = [None if (one := prompt_logprob(k, t)) is None else [one, []] for k, t in enumerate(_PROMPT)]
    return [{"prompt": 0, "token_ids": _PROMPT, "logprobs": logprobs}]


def _best(seed: int, length: int) -> list[int]:
    """The candidates that best_of chooses, best first."""
    return sorted(range(_BEST_OF), key=lambda made: -sum(logprob(seed, made, index) for index in range(length)))


def _keys(server: Redis, pattern: str) -> list[str]:
    return [text(name) for name in server.keys(pattern)]
