"""Fuzzed HTTP requests at a real gateway, with a real worker behind it.

    python -m tests.fuzz.on_http --requests 10000

Connections come a few at a time. Every answer has to be HTTP, every error one of those that docs/use/http.md declares
and of their form, no 5xx but those that a caller brings about himself; whole requests are all answered. The gateway and
the worker have to live, and to hold nothing afterwards. Prints a report as JSON; exits with 1 where any of that does
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.fuzz.answers import Malformed, faults, take
from tests.fuzz.drawing import drawn
from tests.fuzz.requests import Route, Visit, routes, visits
from tests.fuzz.watch import Held, held
from tests.processes import ROOT, Worker, free_port, running_valkey
from workers.trials.chaos.checker.rest import at_rest, held_by

MODEL = "tiny"
#: torch's CPU library keeps what it has compiled for each number of rows, 1024 of each kind, before it lets go: some
#: hundreds of MiB, and an hour until there is no more to come. So its caches are small where growth is judged.
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 64, "LRU_CACHE_CAPACITY": 64, "MALLOC_ARENA_MAX": 1}
ENGINE = {"dtype": "float32", "threads": 1, "max_num_seqs": 32, "kv_cache_bytes": 16 << 20}
#: A process that is not there after so long (s) never will be.
BOOT_S = 180.0
#: Connections at a time.
OPEN = 12
#: Seconds within which a request has to come in whole.
RECEIVE_S = 1.5
#: A whole request that is not answered after so long (s) never will be.
PATIENCE_S = 90.0
#: A connection on which nothing more comes after an answer (s).
SILENCE_S = 0.05
#: Part of the requests after which what processes hold is what they usually hold.
WARM = 0.3
#: Files and threads that come and go with connections to the store.
LOOSE = 16


_TRACE = re.compile(r"Traceback.*?^\w[^\n]*$", re.DOTALL | re.MULTILINE)


@dataclass(slots=True)
class Findings:
    seed: int
    sent: int = 0
    answers: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    faults: list[str] = field(default_factory=list)
    held: dict[str, list[Held]] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "requests": self.sent,
            "answers": self.answers,
            "closed_without_an_answer": self.unanswered,
            "seconds": self.seconds,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "kinds": dict(self.kinds.most_common()),
            "held": {name: [asdict(one) for one in both] for name, both in self.held.items()},
            "faults": self.faults,
        }


class House:
    """A server, a gateway and a worker, each a process."""

    def __init__(self, url: str, lease: float = 10.0, plugin: str = "", receive: float = RECEIVE_S) -> None:
        """`receive`: the gateway's, within which a request must have come in (s)."""
        self._server = url
        self.redis = Redis.from_url(url)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(prefix="penstock-gateway-", suffix=".log")[1])
        settings = {"broker": url, "store": url, "port": self.port, "receive": receive, "heartbeat": 1.0}
        argv = [sys.executable, "-m", "tests.fuzz.gateway_process", json.dumps(settings)]
        with self.log.open("w") as log:
            self.gateway = subprocess.Popen(argv, cwd=ROOT, env=dict(os.environ), stdout=log, stderr=subprocess.STDOUT)
        factory = "workers.runtime.worker:load_engine"
        self.worker = Worker(
            url,
            model=MODEL,
            engine_factory=factory,
            engine=ENGINE,
            lease=lease,
            LOG_LEVEL="ERROR",
            WORKER_PLUGINS=plugin,
            **SMALL_CACHES,
        )

    def wait_ready(self) -> None:
        self.worker.wait_ready(BOOT_S)
        self.worker.wait_until(self._answers, BOOT_S)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz").status_code == 200
        return False

    def known(self) -> tuple[Route, ...]:
        return routes(httpx.get(f"{self.url}/openapi.json", timeout=BOOT_S).json())

    def tasks(self) -> list[bytes]:
        """Ids of some that are over, each of another kind."""
        bodies: list[dict[str, Any]] = [
            {"prompt": "def f(", "max_tokens": 5},
            {"prompt": "def g(", "max_tokens": 4, "n": 2, "logprobs": 2, "prompt_logprobs": 1},
            {"prompt": "x", "max_tokens": 200, "timeout": 0.001},
        ]
        with httpx.Client(base_url=self.url, timeout=PATIENCE_S) as http:
            ids = [http.post("/v1/tasks", json={"model": MODEL, **body}).json()["id"] for body in bodies]
        self.worker.wait_until(lambda: all(self.redis.hexists(keys.task(task_id), "settled") for task_id in ids))
        return [task_id.encode() for task_id in ids]

    def idle(self) -> dict[str, Held]:
        """What each process holds when there is nothing to do. Raises AssertionError where there is something to do."""
        self.worker.wait_until(
            lambda: not self.redis.exists(keys.READERS) and not self.redis.keys(broker_keys.inflight("*"))
        )
        with Redis.from_url(self._server, decode_responses=True) as text:
            assert not list(filter(held_by, at_rest(text)))
        return {"gateway": held(self.gateway.pid), "worker": held(self.worker.process.pid)}

    def close(self) -> list[str]:
        """Stop all; say what would not stop as it should."""
        found = []
        self.gateway.terminate()
        try:
            if code := self.gateway.wait(PATIENCE_S):
                found.append(f"the gateway exited with {code}: {self.log.read_text()[-3000:]}")
        except subprocess.TimeoutExpired:
            self.gateway.kill()
            found.append("the gateway did not stop")
        try:
            if code := self.worker.stop(seconds=60):
                found.append(f"the worker exited with {code}: {self.worker.log.read_text()[-3000:]}")
        except subprocess.TimeoutExpired:
            self.worker.process.kill()
            found.append("the worker did not stop")
        said = set(_TRACE.findall(self.log.read_text()))
        found += [f"in the gateway's log: {trace[-1500:]}" for trace in said]
        self.redis.close()
        self.log.unlink()
        self.worker.log.unlink()
        return found


async def call(port: int, visits: Sequence[Visit], findings: Findings) -> None:
    """All of them, some at a time."""
    room = asyncio.Semaphore(OPEN)

    async def one(visit: Visit) -> None:
        async with room:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await _call(port, visit, findings)
            except TimeoutError:
                findings.faults.append(f"no answer within {PATIENCE_S} s: {visit!r:.3000}")
            except OSError as error:
                findings.faults.append(f"cannot connect: {error!r}")
        findings.sent += 1
        findings.kinds[visit.kind.partition(", ")[0]] += 1

    await asyncio.gather(*map(one, visits))


async def _call(port: int, visit: Visit, findings: Findings) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            for number, piece in enumerate(visit.pieces):
                if number:
                    await asyncio.sleep(visit.pause)
                writer.write(piece)
                await writer.drain()
        if not visit.leaves:
            await _read(reader, visit, findings)
    finally:
        writer.transport.abort() if visit.leaves else writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, visit: Visit, findings: Findings) -> None:
    """Until the answer is there, and (where there may be more) nothing follows."""
    head = b"".join(visit.pieces)[:5] == b"HEAD "
    data, answered, closed = b"", 0, False
    try:
        while True:
            answer, data = take(data, head=head, closed=closed)
            if answer is not None:
                answered += 1
                findings.answers += 1
                findings.statuses[answer.status] += 1
                findings.faults += [f"{fault}\n  after {visit!r:.3000}" for fault in faults(answer, head=head)]
                head = False
                continue
            if closed or (answered and not visit.broken):
                break
            try:
                async with asyncio.timeout(SILENCE_S if answered and not data else None):
                    more = await reader.read(1 << 16)
            except TimeoutError:
                break
            except ConnectionError:
                more = b""
            closed = not more
            data += more
    except Malformed as error:
        if b"HEAD " not in b"".join(visit.pieces):
            findings.faults.append(f"{error}\n  after {visit!r:.3000}")
        return
    if not answered:
        findings.unanswered += 1
        if not visit.broken:
            findings.faults.append(f"closed without an answer: {visit!r:.3000}")


@contextlib.contextmanager
def house() -> Iterator[House]:
    with running_valkey() as server:
        made = House(f"redis://127.0.0.1:{server.port}/0")
        try:
            made.wait_ready()
            yield made
        finally:
            for process in (made.gateway, made.worker.process):
                if process.poll() is None:
                    process.kill()


def run(count: int, start: int) -> Findings:
    """Make `count` connections, the same ones for the same `start`."""
    findings = Findings(start)
    began = time.monotonic()
    with house() as made:
        strategy = visits(made.known(), MODEL, made.tasks())
        page: list[Visit] = []
        for number, visit in enumerate(drawn(strategy, count, start), 1):
            page.append(visit)
            if len(page) < 100 and number < count:
                continue
            asyncio.run(call(made.port, page, findings))
            page = []
            if made.gateway.poll() is not None or made.worker.process.poll() is not None:
                findings.faults.append(f"gateway {made.gateway.poll()}, worker {made.worker.process.poll()}")
                break
            if not findings.held and number >= count * WARM:
                findings.held = {name: [one] for name, one in made.idle().items()}
            print(f"{number} requests, {len(findings.faults)} faults", file=sys.stderr, flush=True)
        else:
            for name, after in made.idle().items():
                before = findings.held[name][0]
                findings.held[name].append(after)
                if after.files > before.files + LOOSE or after.threads > before.threads + LOOSE:
                    findings.faults.append(f"the {name} has more files or threads than before: {before}, {after}")
        findings.faults += made.close()
    findings.seconds = round(time.monotonic() - began, 1)
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    findings = run(args.requests, args.seed)
    print(json.dumps(findings.report(), indent=2))
    sys.exit(1 if findings.faults else 0)


if __name__ == "__main__":
    main()
