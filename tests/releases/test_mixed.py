"""Two releases serve one system, while one takes the other's place, and back: nothing is lost, repeated or different.

Each release's processes are real ones, with a real model: gateway, worker, sweeper and webhooks. The load is streams
with seeds, outputs of a form, tools, background responses, tasks with webhooks and a batch. Callers have API keys. The
broker is the store's Valkey, or SQS.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import keys as admin
from producers.contract import keys
from producers.rollouts import operations
from producers.rollouts.metrics import Evidence
from producers.store.access.audit import Actor
from producers.store.fleet import canaries, cards
from producers.store.fleet.canaries import Plan
from tests.aws import Aws, running_aws
from tests.conformance.conftest import TINY
from tests.conformance.test_tools import MESSAGES, TEMPLATE, TOOLS
from tests.exhaustive import few
from tests.histories import TIMES, examples
from tests.processes import ROOT, free_port, guarded, valkey
from tests.waiting import PATIENCE_S, within
from tests.warm import Forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Running = subprocess.Popen[bytes] | Forked

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,  # the release before leaves an object open that does not say
}
#: Lines of a batch.
LINES = examples(6, 12)
#: Seconds for which a received message is hidden on SQS, longer than any test waits: none comes twice by itself.
HIDDEN_S = "3600"
#: Seconds between two looks at what runs, which take time from it.
LOOK_S = 0.1
#: In the order in which they start.
ALL = ("sweeper", "webhooks", "gateway", "worker")
#: So that no worker takes all that comes.
FEW = ("--dtype", "float32", "--max-num-seqs", "4")
SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


@dataclass
class Receiver:
    """Receives webhooks on loopback. `ids`: how often each event came, by its task."""

    url: str
    got: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.got[body["data"]["id"]] += 1
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_port}/")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


@dataclass
class System:
    """One Valkey, and the processes of each release that run, by name. `aws`: where the broker is SQS."""

    url: str
    store: Redis
    aws: Aws | None
    model: Path
    folder: Path
    before: Path
    receiver: Receiver
    key: str = ""
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, dict[str, Running]] = field(default_factory=lambda: {"before": {}, "this": {}})

    def start(self, release: str, *names: str) -> None:
        """Begin a release's processes, all unless some are named. `release`: `before` or `this`."""
        files, allow = ("--files-dir", str(self.folder / "files")), ("--webhook-allow", "127.0.0.0/8")
        options: dict[str, tuple[str, ...]] = {
            "sweeper": files,
            "webhooks": ("run", *allow),
            "gateway": ("--auth", "keys", *files, *allow),
            "worker": ("--model", str(self.model), "--threads", "1", *FEW),
        }
        for name in names or ALL:
            more = options[name]
            if name == "gateway":
                self.ports[release] = free_port()
                more = (*more, "--port", str(self.ports[release]))
            self.running[release][name] = self._run(release, name, *more)

    def _run(self, release: str, *command: str) -> Running:
        path = self.before if release == "before" else ROOT
        broker = self.aws.broker(visibility=HIDDEN_S) if self.aws else self.url
        env = {**os.environ, "PYTHONPATH": str(path), "BROKER_URL": broker, "STORE_URL": self.url}
        if release == "this" and command[0] != "worker":  # torch does not fork well
            argv = [sys.executable, "-m", "workers.cli", *command]
            return Forked(argv, env, self._log(release, command[0]))
        argv = guarded(sys.executable, "-P", "-m", "workers.cli", *command)
        with self._log(release, command[0]).open("a") as log:
            return subprocess.Popen(argv, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _log(self, release: str, name: str) -> Path:
        return self.folder / f"{release}-{name}.log"

    def until_ready(self, release: str) -> None:
        """Its gateway answers, and its worker has its lease."""
        workers = sum("worker" in its for its in self.running.values())
        with httpx.Client() as http:

            def ready() -> bool:
                assert all(one.poll() is None for one in self.running[release].values()), self.logs()
                if len(self.releases()) < workers:
                    return False
                if "gateway" not in self.running[release]:
                    return True
                try:
                    return http.get(f"http://127.0.0.1:{self.ports[release]}/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            assert within(ready, every_s=LOOK_S), self.logs()

    def releases(self) -> list[str]:
        """The releases of the workers that live; that before names none."""
        leases = [self.store.get(name) for name in self.store.keys(keys.lease("*"))]
        return sorted(str(json.loads(lease).get("release")) for lease in leases if lease)

    def owners(self) -> set[str]:
        """The workers that began a task."""
        runs = [self.store.hget(name, "run:1") for name in self.store.keys(keys.task("*"))]
        return {json.loads(run)[0] for run in runs if run}

    def two_run(self) -> bool:
        """Two workers have tasks at this moment."""
        with self.store.pipeline(transaction=False) as pipe:
            for name in self.store.keys(keys.task("*")):
                pipe.hmget(name, "status", "owner")
            return len({owner for status, owner in pipe.execute() if status == "in_progress" and owner}) > 1

    def stop(self, release: str, *names: str) -> None:
        """SIGTERM, as an update does, and wait until all have ended in order; all unless some are named."""
        processes = [self.running[release].pop(name) for name in names or ALL]
        for process in processes:
            process.terminate()
        for process in processes:
            assert process.wait(PATIENCE_S) == 0, self.logs()

    def check_nothing_left(self) -> None:
        """No dead letter, and no message in SQS; acknowledgements may be on their way."""
        assert self.store.llen("penstock:dead") == 0
        if aws := self.aws:
            assert within(lambda: not any(aws.messages().values()), 60, LOOK_S), aws.messages()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def http(self, release: str) -> httpx.Client:
        url = f"http://127.0.0.1:{self.ports[release]}"
        return httpx.Client(base_url=url, headers={"authorization": f"Bearer {self.key}"}, timeout=PATIENCE_S)


@pytest.fixture
def system(request: pytest.FixtureRequest, tmp_path: Path, before: Path, receiver: Receiver) -> Iterator[System]:
    model = tmp_path / "caller"
    shutil.copytree(TINY, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with valkey() as (url, store), ExitStack() as stack:
        aws = stack.enter_context(running_aws()) if request.param == "sqs" else None
        made = System(url, store, aws, model, tmp_path, before, receiver)
        made.key = asyncio.run(_key(url))

        def kill() -> None:
            for process in [one for its in made.running.values() for one in its.values()]:
                process.kill()
                process.wait()

        stack.callback(kill)
        yield made


async def _key(url: str) -> str:
    async with AsyncRedis.from_url(url) as store:
        fields = {"tenant": "caller", "scopes": ("submit", "read", "cancel")}
        return (await admin.create(store, fields, Actor("test")))[1]


# ---- the load ------------------------------------------------------------------------------------------------------


def stream(http: httpx.Client, seed: int) -> Any:
    body = {"model": "caller", "prompt": f"def f{seed}", "max_tokens": 120, "seed": seed, "stream": True}
    found: list[str] = []
    with http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(found)


def form(http: httpx.Client, seed: int) -> Any:
    body = {"model": "caller", "prompt": "x", "max_tokens": 60, "seed": seed, "json_schema": SCHEMA}
    return _task(http, body)["choices"][0]["text"]


def tool(http: httpx.Client, seed: int) -> Any:
    body = {"model": "caller", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
    (choice,) = _post(http, "/v1/chat/completions", body | {"seed": seed})["choices"]
    return [call["function"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]


def response(http: httpx.Client, seed: int) -> Any:
    body = {"model": "caller", "input": f"Say {seed}", "max_output_tokens": 30, "background": True, "temperature": 0}
    path = f"/v1/responses/{_post(http, '/v1/responses', body)['id']}"
    assert within(lambda: http.get(path).json()["status"] not in ("queued", "in_progress"), 120, LOOK_S)
    ended = http.get(path).json()
    return ended["status"], ended["output"][0]["content"][0]["text"]


def batch(http: httpx.Client, seed: int) -> Any:
    lines = [
        {"custom_id": f"{k:02}", "method": "POST", "url": "/v1/completions", "body": {"model": "caller", "seed": k}}
        for k in range(LINES)
    ]
    for line in lines:
        line["body"] |= {"prompt": f"class C{seed}", "max_tokens": 30}  # type: ignore[operator]
    content = "\n".join(map(json.dumps, lines))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}).raise_for_status()
    made = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    path = f"/v1/batches/{_post(http, '/v1/batches', made)['id']}"
    ended = ("completed", "failed", "expired")
    assert within(lambda: http.get(path).json()["status"] in ended, 180, LOOK_S), http.get(path).text
    found = http.get(path).json()
    output = http.get(f"/v1/files/{found['output_file_id']}/content").raise_for_status().text
    answers = sorted(map(json.loads, output.splitlines()), key=lambda answer: answer["custom_id"])
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    return found["status"], found["request_counts"], texts


KINDS: dict[str, Callable[[httpx.Client, int], Any]] = {
    "stream": stream,
    "form": form,
    "tool": tool,
    "response": response,
    "batch": batch,
}
#: How many of each at once.
LITTLE = {"stream": 2, "form": 1, "tool": 1, "response": 1, "batch": 1, "hook": 1}
LOAD = LITTLE if not TIMES else {"stream": 4, "form": 3, "tool": 2, "response": 2, "batch": 1, "hook": 3}


def _post(http: httpx.Client, path: str, body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def _task(http: httpx.Client, body: dict[str, Any]) -> Any:
    path = f"/v1/tasks/{_post(http, '/v1/tasks', body)['id']}"
    assert within(lambda: http.get(path).json()["status"] not in ("queued", "in_progress"), 120, LOOK_S)
    ended = http.get(path).json()
    assert ended["status"] == "completed", ended
    return ended


@dataclass
class Load:
    """Requests that are sent to gateways that take them. `hooks`: ids of tasks whose webhook is to come."""

    system: System
    pool: ThreadPoolExecutor
    hooks: list[str] = field(default_factory=list)

    def begin(self, *releases: str, counts: dict[str, int] = LOAD) -> list[tuple[str, int, Future[Any]]]:
        """One round by each of these releases' gateways. `counts`: how many of each kind."""
        return [
            (kind, seed, self.pool.submit(self._one, release, kind, seed))
            for release in releases
            for kind, count in counts.items()
            for seed in range(count)
        ]

    def _one(self, release: str, kind: str, seed: int) -> Any:
        with self.system.http(release) as http:
            if kind != "hook":
                return KINDS[kind](http, seed)
            body = {"model": "caller", "prompt": "x", "max_tokens": 20, "seed": seed}
            ended = _task(http, body | {"webhook": {"url": self.system.receiver.url, "secret": SECRET}})
            self.hooks.append(ended["id"])
            return ended["choices"][0]["text"]

    def begin_on_two(self, release: str, expected: dict[tuple[str, int], Any], counts: dict[str, int] = LOAD) -> Any:
        """A round that two workers are at; one that a single worker took is ended, and another begun."""
        while True:
            begun = self.begin(release, counts=counts)
            while not all(answer.done() for _, _, answer in begun):
                if self.system.two_run():
                    return begun
                time.sleep(LOOK_S / 4)
            self.check(begun, expected)

    def check(self, begun: list[tuple[str, int, Future[Any]]], expected: dict[tuple[str, int], Any]) -> None:
        """Each answer is the one that the release before gave alone."""
        for kind, seed, answer in begun:
            assert answer.result(300) == expected.setdefault((kind, seed), answer.result()), (kind, seed)
        got = self.system.receiver.got
        assert within(lambda: all(got[task_id] for task_id in self.hooks)), self.system.logs()
        assert {got[task_id] for task_id in self.hooks} == {1}


@pytest.mark.parametrize("system", few(["valkey", "sqs"], "valkey"), indirect=True)
def test_one_release_takes_the_others_place_and_back_under_load(system: System) -> None:
    expected: dict[tuple[str, int], Any] = {}
    with ThreadPoolExecutor(64) as pool:
        load = Load(system, pool)
        system.start("before")
        system.until_ready("before")
        load.check(load.begin("before"), expected)

        system.start("this")
        system.until_ready("this")
        assert len(system.releases()) == 2
        load.check(load.begin("before", "this"), expected)
        assert len(system.owners()) == 2

        for old, new in (("before", "this"), ("this", "before")):
            if not system.running[new]:
                system.start(new)
                system.until_ready(new)
            begun = load.begin_on_two(new, expected)  # by the gateway that stays
            system.stop(old)
            load.check(begun, expected)
            load.check(load.begin(new, counts=LITTLE), expected)
        system.check_nothing_left()


@pytest.mark.exhaustive
@pytest.mark.parametrize("system", ["valkey"], indirect=True)
def test_a_gateway_of_the_release_before_sends_all_to_the_default_during_a_rollout(system: System) -> None:
    """It knows no routing, only the card. What it sends is no random part, so it counts for neither version."""
    system.start("this", "sweeper", "gateway", "worker")
    system.start("before", "gateway")
    for release in ("this", "before"):
        system.until_ready(release)
    store, drawn, sent = system.store, Counter[str](), {}
    version = str((cards.read(store, "caller") or {})["version"])
    cards.add_version(store, {**(cards.read(store, "caller") or {}), "version": "candidate"}, {})
    plan = Plan(steps=(50.0,), hold_s=3600, lost_s=3600, warm_up_s=0)
    operations.start(store, "caller", "candidate", plan)
    operations.promote(store, "caller")  # there is no worker of it
    for release in ("this", "before"):
        with system.http(release) as http:
            body = {"model": "caller", "prompt": "x", "max_tokens": 2}
            sent[release] = [_post(http, "/v1/tasks", body)["id"] for _ in range(40)]
    for task_id in sent["this"]:
        drawn[str(store.hget(keys.task(task_id), "version"))] += 1
    assert min(drawn[version], drawn["candidate"]) > 5, drawn
    assert drawn.total() == drawn[version] + drawn["candidate"]
    of_before = [keys.task(task_id) for task_id in sent["before"]]
    assert not any(store.hget(record, "drawn") for record in of_before)
    assert within(lambda: all(store.hget(record, "status") == "completed" for record in of_before)), system.logs()
    assert {store.hget(record, "version") for record in of_before} == {version}

    def evidence() -> Evidence:
        state = canaries.read(store, "caller")
        assert state is not None
        return Evidence.of(canaries.read_evidence(store, "caller"), state)

    assert within(lambda: evidence().baseline.tasks == drawn[version]), (evidence(), drawn)
    operations.promote(store, "caller", full=True)
    for release in ("this", "before"):
        with system.http(release) as http:  # the release before keeps a card for 2 s

            def goes_to_it(http: httpx.Client = http) -> bool:
                return store.hget(keys.task(_post(http, "/v1/tasks", body)["id"]), "version") == "candidate"

            assert within(goes_to_it, 60, LOOK_S), release


@pytest.mark.exhaustive
@pytest.mark.parametrize("system", ["sqs"], indirect=True)
def test_workers_on_sqs_take_each_others_place_and_back_under_load(system: System) -> None:
    """Tasks come from a gateway of this release, a batch's lines from a sweeper of the one before."""
    expected: dict[tuple[str, int], Any] = {}
    with ThreadPoolExecutor(32) as pool:
        load = Load(system, pool)
        system.start("this", "gateway")
        system.start("before", "sweeper", "webhooks", "worker")
        system.until_ready("this")
        system.until_ready("before")
        load.check(load.begin("this", counts=LITTLE), expected)
        for old, new in (("before", "this"), ("this", "before")):
            system.start(new, "worker")
            system.until_ready(new)
            begun = load.begin_on_two("this", expected, LITTLE)
            system.stop(old, "worker")
            load.check(begun, expected)
        assert len(system.owners()) == 3
        system.check_nothing_left()
