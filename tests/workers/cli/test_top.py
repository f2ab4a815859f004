"""`penstock top`: one screen from a real gateway, live in a terminal, and with hostile names and faults."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from redis import Redis

from producers.contract import keys
from tests.processes import ROOT
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.test_fleet import announce
from tests.producers.gateway.test_keys import make
from tests.workers.cli.conftest import Run, Scripted, send
from workers.cli.top import screen

__all__ = ["make"]

WAIT_S = 60.0


def test_one_screen_of_workers_queues_models_and_tasks(penstock: Run, valkey: Redis) -> None:
    announce(valkey)
    announce(valkey, "w2.x", worker="w2", unready=["a step hangs"], share=0.3, tensor_parallel=2, pipeline_parallel=3)
    task_id = penstock("submit", "tiny", "def f", "--tier", "priority").out.strip()
    ran = penstock("top")  # standard output is no terminal
    assert (ran.status, ran.err) == (0, "")
    assert "1 of 2 workers ready" in ran.out
    assert re.search(r"^w2 +unready: a step hangs", ran.out, re.MULTILINE), "those that need somebody come first"
    assert ran.out.index("w2 ") < ran.out.index("w1 ")
    assert ran.out.count("cpu (30%), 6 ranks: 2x3") == 1, "it shares its device"
    assert re.search(r"^tiny@\S+ +1 +0 +0 +priority 1 \(", ran.out, re.MULTILINE)
    assert task_id[:8] in ran.out
    assert task_id not in penstock("top", "--no-tasks").out
    state = json.loads(penstock("top", "--json").out)
    assert [task["id"] for task in state["tasks"]] == [task_id]
    assert state["fleet"]["totals"]["workers"] == state["overview"]["totals"]["workers"] == 2


def test_names_are_shown_as_text_and_tables_are_cut(penstock: Run, valkey: Redis) -> None:
    announce(valkey, worker="[red]x\x1b[2J\ny")
    state = json.loads(penstock("top", "--json").out)
    worker = state["fleet"]["workers"][0]
    state["fleet"]["workers"] = [worker] * 30
    from rich.console import Console

    console = Console(width=200, force_terminal=False, markup=False)
    with console.capture() as captured:
        console.print(screen(state, "http://x", "it broke", rows=4))
    text = captured.get()
    assert "[red]x\u241b[2J y" in text
    assert "\x1b" not in text
    assert "... 26 more" in text
    assert "no answer, this is what was last seen: it broke" in text


def test_a_key_that_may_not_read_tasks_sees_the_rest(
    run: Run, open_door: Open, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = open_door(auth="keys").url
    monkeypatch.setenv("PENSTOCK_API_KEY", make(scopes=("metrics",)))
    state = json.loads(run("top", "--json", "--url", url).out)
    assert state["tasks"] is None
    assert "tasks, latest first" not in run("top", "--url", url).out
    monkeypatch.setenv("PENSTOCK_API_KEY", make(scopes=("read",)))
    ran = run("top", "--url", url)
    assert (ran.status, "metrics" in ran.err) == (2, True), "that scope shows nothing of others"


def test_tasks_are_one_page_of_each_status_however_many_tasks_there_are(
    run: Run, penstock: Run, scripted: Scripted
) -> None:
    """A gateway looks through 2,000 records for a page, and says that there may be more."""
    state = json.loads(penstock("top", "--json").out)
    page = json.dumps({"object": "list", "data": [], "first_id": None, "last_id": "~5", "has_more": True}).encode()
    answers = [json.dumps(state[name]).encode() for name in ("overview", "fleet")]
    scripted.answers += [send(200, each) for each in (*answers, page, page)]
    assert run("top", "--url", scripted.url).status == 0
    assert [path.partition("?")[0] for path in scripted.paths] == [
        "/v1/overview",
        "/v1/fleet",
        "/v1/tasks",
        "/v1/tasks",
    ]


def test_a_gateway_that_is_away_is_an_exit_status(run: Run) -> None:
    ran = run("top", "--once", "--url", "http://127.0.0.1:9")
    assert (ran.status, "no answer from http://127.0.0.1:9" in ran.err) == (3, True)


def test_it_lives_in_a_terminal_and_ends_with_ctrl_c(door: Door, valkey: Redis) -> None:
    """The screen is drawn again as workers come, and the terminal is given back."""
    announce(valkey)
    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-m", "workers.cli", "top", "--every", "0.5", "--url", door.url]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160", "LINES": "60"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
    os.close(child)
    try:
        seen = read_until(parent, b"w1 ")
        assert b"\x1b[?1049h" in seen, "on the other screen"
        announce(valkey, "w2.x", worker="w-second")
        read_until(parent, b"w-second")
        valkey.delete(keys.lease("w2.x"))
        process.send_signal(signal.SIGINT)
        read_until(parent, b"\x1b[?1049l")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_a_gateway_that_comes_back_is_seen_again(penstock: Run, valkey: Redis, scripted: Scripted) -> None:
    """What was seen last stays on the screen meanwhile, and says so."""
    announce(valkey)
    state = json.loads(penstock("top", "--json").out)
    answers = [json.dumps(state[name]).encode() for name in ("overview", "fleet")]
    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-m", "workers.cli", "top", "--no-tasks", "--every", "0.5", "--url", scripted.url]
    scripted.answers += [*(send(200, each) for each in answers), send(503, b"away")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160", "LINES": "60"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
    os.close(child)
    try:
        read_until(parent, b"this is what was last seen")
        scripted.answers += [send(200, each.replace(b'"w1"', b'"w-back"')) for each in answers]
        read_until(parent, b"w-back")
        scripted.answers.append(send(401, b'{"error": {"message": "no key", "code": "c", "param": null}}'))
        read_until(parent, b"no key")
        assert process.wait(WAIT_S) == 2, "what is refused is not asked for again"
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen, end = b"", time.monotonic() + WAIT_S
    while wanted not in seen:
        assert time.monotonic() < end, seen[-2000:]
        if select.select([terminal], [], [], 1.0)[0]:
            with suppress(OSError):
                piece = os.read(terminal, 1 << 16)
                seen += piece
    return seen
