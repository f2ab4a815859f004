"""What harms somebody else's system leaves no more harm there than it says, and reads whatever others left there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from producers.connection.connect import connect
from tests.waiting import until
from workers.processes.proc import argv_of
from workers.trials.chaos.checker.case import Journal
from workers.trials.chaos.checker.store import Stores
from workers.trials.chaos.client import Settings
from workers.trials.chaos.injector import Injector, Pulse
from workers.trials.chaos.load import Load
from workers.trials.chaos.operated import Operated, Process
from workers.trials.chaos.plan import Fault, Plan

#: Starts the load, and says its process.
_LOAD: Final = """
import sys
from pathlib import Path
from workers.trials.chaos.client import Settings
from workers.trials.chaos.trial import OneClient
settings = Settings.parse(sys.argv[1])
client = OneClient(settings, Path(settings.folder))
client.start_clients()
print(client._process.pid, flush=True)
client._process.wait()
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """What is called as a worker is, and does nothing."""
    argv = [sys.executable, "-c", "input()", "-m", "workers.cli", "worker", "--name", "w1"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE)
    until(lambda: argv_of(process.pid))  # Popen hears of the exec a moment before the kernel has its words
    yield process
    process.kill()
    process.communicate()


def _injector(system: Operated, folder: Path, url: str) -> Injector:
    journal = Journal(folder, "trial")
    return Injector(system, journal, url, url, list, Pulse(url, journal))


def _stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("kill", {"kill": "false"}),
        ("pause", {"pause": f"{sys.executable} -c 'import os; os.kill({{name}}, 19); raise SystemExit(1)'"}),
    ],
)
def test_what_was_held_still_goes_on_where_it_could_not_be_harmed(
    worker: subprocess.Popen[bytes], tmp_path: Path, valkey_url: str, kind: str, commands: dict[str, str]
) -> None:
    commands = {verb: command.replace("{name}", str(worker.pid)) for verb, command in commands.items()}
    system = Operated([Process("w1", "worker", str(worker.pid), commands)], valkey_url)
    connect(valkey_url).mset({"penstock:lease:w1.0": '{"worker": "w1"}', "penstock:lease:w2.0": '{"worker": "w2"}'})
    said: list[str] = []
    plan = Plan(1, 0.0, 1.0, (Fault(0.0, kind, "w1", 0.1),))
    _injector(system, tmp_path, valkey_url).run(plan, said.append)
    assert any("missed" in line for line in said)
    assert worker.poll() is None
    assert not _stands_still(worker.pid)


def test_what_has_ended_for_good_is_not_waited_for(
    worker: subprocess.Popen[bytes], tmp_path: Path, valkey_url: str
) -> None:
    """Whatever runs in its place has another process id; a file may get to say which."""
    worker.kill()
    worker.wait()
    (tmp_path / "pid").write_text(str(worker.pid))
    system = Operated(
        [Process("w1", "worker", str(worker.pid)), Process("w2", "worker", str(tmp_path / "pid"))], valkey_url
    )
    assert system.fits(Fault(0.0, "kill", "w1"))
    assert not system.fits(Fault(0.0, "kill", "w2"))
    said: list[str] = []
    _injector(system, tmp_path, valkey_url).run(Plan(1, 0.0, 1.0, (Fault(0.0, "kill", "w1"),)), said.append)
    assert "missed" in said[-1]


def test_a_plan_with_what_cannot_be_done_is_refused_before_anything_is() -> None:
    system = Operated([Process("w1", "worker", "1"), Process("b", "broker", "2")], "redis://127.0.0.1:1/0")
    system.check(Plan(1, 9.0, 10.0, (Fault(1.0, "kill", "w1"), Fault(2.0, "pause", "b", 1.0))))
    for kind, target in (("kill", "w2"), ("cut", "w1"), ("full", "b"), ("restart", "b"), ("drain", "b")):
        with pytest.raises(ValueError, match=f"the plan (has {kind} of|names) {target}"):
            system.check(Plan(1, 9.0, 10.0, (Fault(1.0, kind, target),)))


def test_a_system_behind_sentinels_can_be_named() -> None:
    """As --help says."""
    system = Operated([Process("w1", "worker", "1")], "redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster/0")
    assert not system.fits(Fault(0.0, "kill", "w1"))  # nobody answers there


@pytest.mark.parametrize(
    "said", ["no JSON", "[]", "{}", '{"faults": [{"at": 1}]}', '{"seed": 1, "seconds": NaN, "lease": 1, "faults": []}']
)
def test_a_file_that_holds_no_plan_is_named(tmp_path: Path, said: str) -> None:
    (tmp_path / "plan.json").write_text(said)
    with pytest.raises(ValueError, match=r"plan\.json holds no plan"):
        Plan.read(tmp_path / "plan.json")


def test_dead_letters_of_others_are_read_whatever_they_hold(valkey_url: str) -> None:
    with connect(valkey_url) as raw:
        raw.rpush("penstock:dead", b'{"reason": "not JSON", "message": "\xff\xfe"}', b"\xff", b"[7]", b'{"message": 7}')
    with connect(valkey_url, decode=True) as client:
        found = Stores.read(client, client, links="penstock:chaos:links", only=["a task"])
    assert [letter["message"] for letter in found.dead] == ["\ufffd\ufffd", "\ufffd", "[7]", "7"]
    assert found.dead[0]["reason"] == "not JSON"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_load_ends_with_the_process_that_began_it_however_that_ends(tmp_path: Path, valkey_url: str) -> None:
    settings = Settings("client", str(tmp_path), "http://127.0.0.1:1", valkey_url, valkey_url, Load(1, "tiny", 1, 1))
    with subprocess.Popen([sys.executable, "-c", _LOAD, settings.text()], stdout=subprocess.PIPE) as chaos:
        assert chaos.stdout is not None
        load = int(chaos.stdout.readline())
        argv = argv_of(load)
        assert argv
        assert valkey_url not in " ".join(argv), "it may hold a password, and everybody sees a command line"
        chaos.kill()
    try:
        until(lambda: not argv_of(load))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(load, signal.SIGKILL)
