"""What a hostile caller costs the others: `python -m tests.bench.hostile`.

A gateway, Valkey and a worker with the stub engine run on one core; the attacker has the other to itself. A victim of
another tenant, on the gateway's core, asks for a short chat 20 times a second. Each attack is compared with an attacker
who only spins. The attacker's key has the smallest limits (`LIMITS`), and some attacks have no key. Beside the victim's
latency: what the attacker was answered, whether `/readyz` stayed 200, and how long a revoked key went on.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing as mp
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from tests.chaos.hostile.stage import TENANT, Stage, stage
from tests.producers.gateway.conftest import CARD
from tests.stub_engine import StubEngine
from workers.trials.bench.connection import Broken, Connections

#: The limits of the attacker's key.
LIMITS: Final = {"rpm": 1, "max_in_flight": 1, "max_waiting": 1}
#: Options of the gateway.
OPTIONS: Final = ("--log-level", "warning")
CHAT: Final = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
#: Seconds between two chats of the victim.
EVERY_S: Final = 0.05
#: Tokens of the attacker's finished task, whose stream and result are large.
LARGE: Final = 20_000
#: For how long (s) an answer is waited for.
PATIENCE_S: Final = 30.0
#: For how long (s) the attacker's process may import.
START_S: Final = 120.0
#: The core of the gateway, Valkey, the worker and the victim, and that of the attacker.
CORES: Final = sorted(os.sched_getaffinity(0))[:: max(1, len(os.sched_getaffinity(0)) - 1)][:2]


def load(model: str, options: dict[str, Any]) -> tuple[StubEngine, dict[str, bytes]]:
    """The stub engine as the model `tiny`, with its tokenizer and chat template."""
    engine = StubEngine(model)
    engine.card.version = CARD.version
    engine.card.to_json = CARD.to_json  # type: ignore[method-assign]
    return engine, {}


@dataclass(frozen=True)
class Attack:
    """An attack: requests that are sent again and again over some connections."""

    says: str
    request: Callable[[Stage, str], bytes]
    """A request's bytes, of the stage and the id of the attacker's finished task."""
    connections: int = 16
    reads: bool = True
    """Whether answers are read. Else the connection is left as it is."""
    leaves: bool = False
    """Whether each connection is closed once its request is sent."""


def post(path: str, body: Any, caller: str | None = "attacker", **headers: str) -> Callable[[Stage, str], bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    return lambda hostile, _: hostile.request(caller, "POST", path, data, headers)


def get(path: str, caller: str | None = "attacker") -> Callable[[Stage, str], bytes]:
    return lambda hostile, task_id: hostile.request(caller, "GET", path.format(task_id))


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": content}], **more}


def form(properties: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"property_{k}": {"type": "string"} for k in range(properties)}}
    return {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}


def upload(size: int) -> Callable[[Stage, str], bytes]:
    parts = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    parts += b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + bytes(size) + b"\r\n--x--\r\n"
    return post("/v1/files", parts, content_type="multipart/form-data; boundary=x")


def wrong_key(hostile: Stage, _: str) -> bytes:
    key = f"Bearer psk_{os.urandom(8).hex()}_{'x' * 43}"
    return hostile.request(None, "GET", "/v1/tasks", headers={"authorization": key})


CHATS: Final = "/v1/chat/completions"
PACKED: Final = gzip.compress(json.dumps(chat("ab " * 1_300_000)).encode())
MANY: Final = {**CHAT, "messages": [{"role": "user", "content": "a"}] * 100_000}
NUMBERS: Final = {"model": "tiny", "prompt": [1] * 1_000_000}
DEEP: Final = b'{"model": "tiny", "metadata": ' + b"[" * 1_000_000
CHUNKS: Final = (
    b"POST /v1/tasks HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"1\r\n \r\n" * 20_000
)
ATTACKS: Final = {
    "large-text": Attack("chats of 4 MB, packed", post(CHATS, PACKED, content_encoding="gzip"), 4),
    "text": Attack("chats of 60 KB", post(CHATS, chat("some words " * 5_500))),
    "messages": Attack("chats of 100,000 messages", post(CHATS, MANY), 4),
    "forms": Attack("schemas of 2,000 properties, n=32", post(CHATS, chat("a", n=32, response_format=form(2000))), 4),
    "small-forms": Attack("schemas of 50 properties", post(CHATS, chat("a", response_format=form(50)))),
    "numbers": Attack("bodies of a million numbers", post("/v1/tasks", NUMBERS), 4),
    "deep": Attack("bodies of a million brackets", post("/v1/tasks", DEEP), 4),
    "limited": Attack("short chats over the key's rpm", post(CHATS, CHAT), 64),
    "replays": Attack("short chats with one Idempotency-Key", post(CHATS, CHAT, idempotency_key="again"), 64),
    "events": Attack("unread streams of a finished task", get("/v1/tasks/{}/events"), 150, reads=False),
    "replayed-events": Attack("streams of a finished task", get("/v1/tasks/{}/events")),
    "results": Attack("a large result", get("/v1/tasks/{}")),
    "lists": Attack("lists of tasks", get("/v1/tasks?limit=100"), 64),
    "uploads": Attack("files of 1 MB", upload(1 << 20)),
    "upgrades": Attack("chats that offer an upgrade", post(CHATS, CHAT, connection="Upgrade", upgrade="h2c"), 64),
    "wrong-keys": Attack("keys that do not work", wrong_key, 64),
    "connects": Attack("connections that are closed at once", get("/livez", None), 64, leaves=True),
    "chunks": Attack("tiny chunks, and closed", lambda hostile, _: CHUNKS, 64, leaves=True),
    "idle": Attack("idle connections", lambda hostile, _: b"G", 1000, reads=False),
    "health": Attack("/readyz without a key", get("/readyz", None), 64),
    "nowhere": Attack("paths that are not there", get("/nowhere", None), 64),
    "document": Attack("/openapi.json without a key", get("/openapi.json", None), 64),
    "assets": Attack("the largest file of /docs", get("/docs/assets/swagger-ui-bundle.js", None), 64),
    "queries": Attack("queries of 64 KB", get("/v1/tasks?" + "a&" * 30_000, None), 64),
    "stops": Attack("64 KB of wrong stop strings", post(CHATS, CHAT | {"stop": [1] * 20_000}), 4),
}


@dataclass
class Measured:
    """What one attack did."""

    p50: float
    p95: float
    """The victim's latency, ms."""
    failed: int
    """Chats of the victim that were not answered 200."""
    unready: int
    """Answers of /readyz that were not 200."""
    revoked_s: float
    """For how long a revoked key went on."""
    answers: Counter[str] = field(default_factory=Counter)
    """What the attacker was answered: statuses, or `closed`."""


def attack(
    name: str | None, core: int, port: int, hostile: dict[str, str], task_id: str, seconds: float, done: Any
) -> None:
    """The attacker's process: puts True when it begins, then what it was answered."""
    os.sched_setaffinity(0, {core})
    done.put(True)
    end = time.monotonic() + seconds
    if name is None:
        while time.monotonic() < end:
            pass
        done.put({})
        return
    kind = ATTACKS[name]
    requests = iter(lambda: kind.request(Stage("", None, port, 0, None, hostile), task_id), None)  # type: ignore[arg-type]
    done.put(dict(asyncio.run(_attack(kind, port, requests, end))))


async def _attack(kind: Attack, port: int, requests: Iterator[bytes], end: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    first = next(requests)
    fresh = kind.request is wrong_key

    async def connection() -> None:
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            except OSError:
                answers["no connection"] += 1
                await asyncio.sleep(0.01)
                continue
            try:
                while time.monotonic() < end:
                    writer.write(next(requests) if fresh else first)
                    async with asyncio.timeout(min(PATIENCE_S, max(0.0, end - time.monotonic()))):
                        await writer.drain()
                        if kind.leaves:
                            answers["left"] += 1
                            break
                        if not kind.reads:
                            await asyncio.Event().wait()
                        answers[await _answer(reader)] += 1
            except TimeoutError:
                answers["waits"] += 1
            except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
                answers["closed"] += 1
            finally:
                writer.transport.abort()

    with suppress(TimeoutError):
        await asyncio.gather(*(connection() for _ in range(kind.connections)))
    return answers


async def _answer(reader: asyncio.StreamReader) -> str:
    """Read an answer to its end. Returns its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    lengths = [int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")]
    if lengths:
        await reader.readexactly(lengths[0])
    elif "transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    return head.split()[1]


async def victim(hostile: Stage, seconds: float) -> Measured:
    """Chat while the attack runs."""
    url, waits, failed, unready = f"http://127.0.0.1:{hostile.port}", list[float](), 0, 0
    chats = Connections(url, hostile.headers("victim"))
    end = time.monotonic() + seconds
    revoked: list[float] = []

    async def status(http: Connections, method: str, path: str, body: Any = None) -> int:
        try:
            async with asyncio.timeout(PATIENCE_S), http.request(method, path, body) as answer:
                await answer.whole()
            return answer.status
        except (TimeoutError, Broken, OSError):
            return 0

    async def looks() -> None:
        nonlocal unready
        anonymous = Connections(url)
        while time.monotonic() < end:
            unready += await status(anonymous, "GET", "/readyz") != 200
            await asyncio.sleep(0.5)

    async def revokes() -> None:
        other = Connections(url, hostile.headers("ended"))
        assert await status(other, "GET", "/v1/models") == 200
        await asyncio.sleep(seconds / 2)
        began = time.monotonic()
        await asyncio.to_thread(hostile.revoke, "ended")
        revoked.append(0.0)
        while (answered := await status(other, "GET", "/v1/models")) in (
            0,
            200,
        ) and time.monotonic() < end + PATIENCE_S:
            revoked[0] = time.monotonic() - began
            await asyncio.sleep(0.02)
        assert answered in (401, 429)  # beside a flood of wrong keys it is one of them

    beside = asyncio.gather(looks(), revokes())
    while (began := time.monotonic()) < end:
        if await status(chats, "POST", CHATS, CHAT) == 200:
            waits.append(1000 * (time.monotonic() - began))
        else:
            failed += 1
        await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
    await beside
    cuts = statistics.quantiles(waits, n=20) if len(waits) > 1 else [float("inf")] * 19
    return Measured(cuts[9], cuts[18], failed, unready, revoked[0])


def measured(name: str | None, seconds: float) -> Measured:
    """One attack on a stage of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})  # inherited by what the stage starts
    try:
        return _measured(name, seconds)
    finally:
        os.sched_setaffinity(0, before)


def _measured(name: str | None, seconds: float) -> Measured:
    factory = {"model": "tiny", "engine_factory": "tests.bench.hostile:load"}
    with stage(*OPTIONS, worker=factory) as hostile:
        task_id = hostile.finished("attacker", tokens=LARGE, logprobs=2)
        hostile.key("attacker", scopes=TENANT, **LIMITS)
        hostile.key("ended", tenant="victim", scopes=TENANT)
        assert hostile.http("victim", "POST", CHATS, json=CHAT).status_code == 200
        context = mp.get_context("spawn")
        done = context.Queue()
        arguments = (name, CORES[-1], hostile.port, hostile.keys, task_id, seconds, done)
        # Found by its name: as a command, this module is `__main__`, which is another one in the attacker's process.
        attacker = context.Process(target=import_module("tests.bench.hostile").attack, args=arguments)
        attacker.start()
        done.get(timeout=START_S)
        found = asyncio.run(victim(hostile, seconds))
        found.answers.update(done.get(timeout=seconds + PATIENCE_S))
        attacker.join(PATIENCE_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hostile", description=__doc__)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of an attack")
    options = parser.parse_args()
    base = measured(None, options.seconds)
    print("| attack | answers a second | victim p50, p95 ms | p95 to spinning | failed | not ready | revoked after s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| spins | | {base.p50:.1f}, {base.p95:.1f} | 1 | {base.failed} | {base.unready} | {base.revoked_s:.2f} |")
    for name in options.attacks:
        found = measured(name, options.seconds)
        said = ", ".join(f"{status} {count / options.seconds:.1f}" for status, count in found.answers.most_common(3))
        times = f"{found.p50:.1f}, {found.p95:.1f} | {found.p95 / base.p95:.2f}"
        rest = f"{found.failed} | {found.unready} | {found.revoked_s:.2f}"
        print(f"| {ATTACKS[name].says} | {said} | {times} | {rest} |", flush=True)


if __name__ == "__main__":
    main()
