"""`penstock up` and `penstock demo` with real processes and the bundled model: what a newcomer runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.aws import Aws
from tests.processes import free_port
from tests.producers.gateway.conftest import TINY, until
from tests.waiting import PATIENCE_S, suspend
from tests.workers.cli.running_up import PENSTOCK, Up, final, task, whole
from tests.workers.library.hub_server import Hub, Repo, running_hub
from workers.cli.client import Gateway, Refused
from workers.processes.proc import argv_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def two_ports() -> int:
    """The first of two that follow each other, and are free. No outgoing connection takes them meanwhile."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.socket() as second:
            second.bind(("", port + 1))
            return port


def with_its_key(system: Up, url: str, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """The gateway for whoever has the first key, which comes from the data directory."""
    with pytest.raises(Refused, match="penstock keys create"):
        Gateway(url).submit(task(max_tokens=3))
    argv = [*PENSTOCK, "keys", "create", "--tenant", "acme", "--data-dir", str(system.data_dir)]
    made = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert f"penstock keys create --tenant NAME --data-dir {system.data_dir}" in system.out
    monkeypatch.setenv("PENSTOCK_API_KEY", made.stdout)
    return Gateway(url)


def strangers_get_nothing(system: Up) -> None:
    """No other user of the machine reads the server's password, or a file; and without it the server does nothing."""
    told = re.search(r"broker  redis://:\*\*\*@127\.0\.0\.1:(\d+)/0, kept in .*\n.*: (penstock url .*)", system.out)
    assert told is not None, system.out
    argv = [*PENSTOCK, *told[2].split()[1:]]
    url = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    password = (system.data_dir / "password").read_text().strip()
    assert url == f"redis://:{password}@127.0.0.1:{told[1]}/0"
    with Redis.from_url(url) as redis:
        assert redis.ping()
    assert system.children().keys() >= {"valkey", "gateway", "worker", "sweeper", "webhooks"}
    for pid in (system.process.pid, *system.children().values()):
        assert password not in " ".join(argv_of(pid))
        # The environment has it. The kernel shows that to its own user and root alone.
        assert Path(f"/proc/{pid}/environ").stat().st_mode & 0o077 == 0
        assert "Umask:\t0077\n" in Path(f"/proc/{pid}/status").read_text()
    assert password not in system.out
    modes = {path: path.stat().st_mode & 0o777 for path in (system.data_dir, *system.data_dir.rglob("*"))}
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}
    if os.getuid() == 0:
        assert as_nobody(int(told[1])) == "-NOAUTH"


def as_nobody(port: int) -> str:
    """What the server answers another user of the machine."""
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(b"HGETALL penstock:webhooks:secrets\r\n")
                theirs.sendall(server.recv(100))
        finally:
            os._exit(0)
    theirs.close()
    os.waitpid(child, 0)
    with ours:
        return ours.recv(100).decode().split()[0]


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=60).status_code == 200
    return False


def born(pid: int) -> int:
    """The start of a process, in clock ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_what_dies_is_started_again_the_next_start_finds_the_queue_and_a_second_signal_hastens(
    up: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for keys, which hold when anything dies."""
    for name in ("PENSTOCK_API_KEY", "BROKER_URL", "STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    system = up("--auth", "keys", "--drain-timeout", "0")
    url = system.wait_ready().url
    until(lambda: "stops it." in system.out)
    gateway = with_its_key(system, url, monkeypatch)
    assert re.search(r"start   \d+\.\d\d s: process \d.*, imports .*, store .*, workers .*, gateway \d", system.out)
    assert re.search(r"worker: Ready in \d+\.\d\d s: process \d.*, imports .*, weights .*, warm_up \d", system.out)
    strangers_get_nothing(system)
    first = [born(system.children()[kind]) for kind in ("worker", "valkey")]
    assert first[0] < first[1], "it begins before its supervisor's imports"

    for victim in ("worker", "gateway", "valkey"):
        _dies(system, gateway, victim)

    # The first one may be handed back in its middle; the others do not begin before the stop.
    ids = [gateway.submit(task(max_tokens=250, n=2))["id"]]
    until(lambda: gateway.task(ids[0])["status"] != "queued")
    (worker,) = system.workers()
    suspend(worker)
    ids += [gateway.submit(task(max_tokens=250, seed=seed, n=2))["id"] for seed in range(1, 12)]
    system.children()
    system.process.send_signal(signal.SIGTERM)
    until(lambda: _has_signals(worker))
    os.kill(worker, signal.SIGCONT)
    assert system.ended() == 0
    stopped = time.time()
    assert system.out.startswith("up | loading the program\n")
    assert re.search(r"up \| \d+ s: waiting for ", system.out)
    assert f"penstock chat tiny --url {url}" in system.out
    assert f"console {url}/console" in system.out
    assert "model.publish" not in system.out
    assert '"did": "model.publish", "what": "tiny@' in (system.data_dir / "audit.log").read_text()
    assert "up | stopping: no new requests are taken, and the workers drain" in system.out
    assert "stopped; queued tasks are kept for the next start" in system.out
    assert system.nothing_left()
    assert os.environ["PENSTOCK_API_KEY"].strip()[21:] not in system.out, "a secret is in its log"

    system = up("--auth", "keys", "--drain-timeout", "100")
    gateway = system.wait_ready()
    ends = [gateway.task(task_id)["finished_at"] for task_id in ids]
    assert any(at is None or at > stopped for at in ends), "all had ended at the stop: nothing was shown"
    for task_id in ids[1:-1]:
        gateway.cancel(task_id)
    for task_id in (ids[0], ids[-1]):
        found = final(gateway, task_id)
        assert found["status"] == "completed"
        assert [len(choice["token_ids"]) for choice in found["choices"]] == [250] * 2
        assert len(whole(gateway, task_id)) == 500
    _hastened(system, gateway)


def _dies(system: Up, gateway: Gateway, victim: str) -> None:
    """It is started again, and no task or token is lost."""
    ids = [gateway.submit(task(max_tokens=100, seed=seed))["id"] for seed in range(2)]
    before = system.children()[victim]
    os.kill(before, signal.SIGKILL)
    until(lambda: system.children().get(victim, before) != before)
    until(gateway.ready)
    for task_id in ids:
        found = final(gateway, task_id)
        assert (found["status"], found["tenant"], found["usage"]["output_tokens"]) == ("completed", "acme", 100)
        assert [index for index, _ in whole(gateway, task_id)] == list(range(100))
    until(lambda: f"{victim} | was ended by SIGKILL; starting it again" in system.out)


def _has_signals(pid: int) -> bool:
    """Whether some wait for it to go on."""
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(pending, 16) for pending in re.findall(r"^(?:Sig|Shd)Pnd:\s+(\w+)$", status, re.MULTILINE))


def _hastened(system: Up, gateway: Gateway) -> None:
    """Ctrl-C lets a stream come to its end; what is left is handed back at a second signal, if it has not ended too."""
    streamed: list[dict[str, Any]] = []
    short = gateway.submit(task(max_tokens=200, n=2))["id"]
    reader = threading.Thread(target=lambda: streamed.extend(gateway.events(short, patience=0.0)), daemon=True)
    reader.start()
    until(lambda: streamed)
    for seed in range(4):
        gateway.submit(task(max_tokens=1000, n=4, seed=seed))
    system.process.send_signal(signal.SIGINT)
    until(lambda: not gateway.ready())
    # Its stream is open until the task's end, though the gateway takes no new callers.
    reader.join(PATIENCE_S)
    assert streamed[-1]["event"] == "end"
    assert len(streamed) == 401
    assert system.stop(signal.SIGTERM) == 0
    told = system.out.count("what runs goes back to the queue now. Ctrl-C again kills all processes")
    assert (told, "handing" in system.out) in ((1, True), (1, False), (0, False))
    assert system.nothing_left()


def test_a_model_of_an_earlier_up_is_neither_listed_nor_called(up: Callable[..., Up]) -> None:
    """Whether that one ended in order, or was killed; and its tasks and its own next start find it."""
    options = ("--min", "0", "--max", "1", "--no-standby")
    earlier = up(*options, "--model", "tiny", "--model", "first=tiny")
    waiting = earlier.wait_ready().submit(task(model="first", tier="batch"))["id"]
    assert earlier.stop() == 0
    killed = up(*options, "--model", "tiny", "--model", "second=tiny")
    gateway = killed.wait_ready()
    assert [model["id"] for model in gateway.models()] == ["second", "tiny"]
    with pytest.raises(Refused, match=r'Nobody serves the model "first".*models here: second, tiny'):
        gateway.submit(task(model="first"))
    killed.children()
    killed.process.kill()
    killed.ended()
    assert killed.nothing_left()
    system = up(*options, "--model", "tiny", "--model", "first=tiny")
    gateway = system.wait_ready()
    assert [model["id"] for model in gateway.models()] == ["first", "tiny"]
    assert gateway.task(waiting)["status"] == "queued"
    assert gateway.submit(task(model="first", tier="batch"))["status"] == "queued"
    assert system.stop() == 0


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_served_is_said_and_nothing_is_left(up: Callable[..., Up], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    system = up("--model", str(tmp_path))
    assert system.ended() == 2
    assert f"cannot serve {tmp_path}: {tmp_path} has no tokenizer.json" in system.out
    assert system.nothing_left()


@pytest.mark.exhaustive
def test_on_a_broker_of_ones_own_no_server_is_started_and_a_model_comes_from_a_hub_once(
    up: Callable[..., Up], valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in TINY.iterdir()}
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))
    with running_hub(Hub({"penstock/py": Repo(files)})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        model = "tiny=hf://penstock/py"
        options = (
            "--broker",
            valkey_url,
            "--workers",
            "2",
            "--model",
            model,
            "--health-port",
            str(port := two_ports()),
        )
        system = up(*options, data_dir=tmp_path / "never")
        gateway = system.wait_ready()
        assert sorted(hub.fetched()) == sorted(files)  # by neither of the two workers again
    # Two workers have the same name here.
    until(lambda: sorted(system.children()) == ["gateway", "sweeper", "webhooks", "worker"])
    assert not (tmp_path / "never").exists()
    for one in (port, port + 1):
        url = f"http://127.0.0.1:{one}/readyz"
        until(lambda: answers(url) and url in system.out)  # noqa: B023 - called at once
    version = next((tmp_path / "models" / "tiny").glob("[!.]*")).name
    assert [(model["id"], model["version"]) for model in gateway.models()] == [("tiny", version)]
    assert final(gateway, gateway.submit(task(max_tokens=4))["id"])["status"] == "completed"
    assert system.stop() == 0


@pytest.mark.exhaustive
def test_with_queues_on_sqs_its_own_server_is_the_store(up: Callable[..., Up], aws: Aws) -> None:
    running = up("--broker", aws.broker())
    gateway = running.wait_ready()
    until(lambda: "stops it." in running.out)
    until(lambda: {"valkey", "gateway", "worker", "sweeper"} <= running.children().keys())
    for kind in ("gateway", "worker", "sweeper"):  # a body that SQS does not take goes where all others look for it
        assert (
            b"--files-dir"
            in Path(f"/proc/{running.children()[kind]}/cmdline").read_bytes().replace(b"\0", b" ").split()
        )
    assert re.search(r"broker  sqs://us-east-1\?prefix=\S+\n", running.out)
    assert re.search(r"store   redis://:\*\*\*@127\.0\.0\.1:\d+/0, kept in .*\n.*penstock url store", running.out)
    ended = final(gateway, gateway.submit(task(max_tokens=4, tier="priority"))["id"])
    assert (ended["status"], len(ended["choices"][0]["token_ids"])) == ("completed", 4)
    queues = aws.client("sqs").list_queues(QueueNamePrefix="pen-tiny_")["QueueUrls"]
    assert {url.rpartition("-")[2] for url in queues} == {"priority", "default", "flex", "batch"}
    assert running.stop() == 0
    assert running.nothing_left()


def test_the_demo_shows_streams_results_and_a_summary_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PENSTOCK, "demo"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for tier in ("priority", "default", "flex", "batch"):
        assert f"{tier:8}] " in done.stdout
        assert re.search(rf"#\d\d {tier} +completed", done.stdout)
    assert "24 tasks" in done.stdout
    assert "TTFT p95" in done.stdout
    assert re.search(r"KV cache: at most [1-9]\d* of \d+ blocks", done.stdout)
    assert re.search(r"[1-9]\d* of \d+ prompt tokens came from", done.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_the_demo_ends_quietly_at_a_signal_and_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*PENSTOCK, "demo", "--tasks", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("[#"):
            assert demo.poll() is None
        demo.send_signal(signal.SIGTERM)
        _, said = demo.communicate(timeout=PATIENCE_S)
    assert (demo.returncode, said) == (130, "penstock: interrupted; everything was stopped\n")
    assert list(tmp_path.iterdir()) == []
