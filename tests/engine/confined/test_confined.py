"""A confined process: answers as its target does, is ended at its limits, and can do nothing but compute."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.confined import ConfinedProcess, Limits, Stopped
from engine.errors import ModelError, RequestError, renamed
from tests.waiting import until

Make = Callable[..., ConfinedProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes confined processes of targets.py, generous only by the clock: others decide when a child runs."""
    made: list[ConfinedProcess] = []

    def confine(name: str, setup: Any = None, **limits: Any) -> ConfinedProcess:
        given = Limits(**{"cpu": 0.5, "wall": 100.0, "memory": 64 << 20, "output": 1 << 20, **limits})
        made.append(ConfinedProcess(f"tests.engine.confined.targets:{name}", setup, given))
        return made[-1]

    yield confine
    for process in made:
        process.close()


def test_setup_and_requests_reach_the_target(make: Make) -> None:
    process = make("echo", {"a": [1, None, "é🙂"]})
    for request in (None, "", 1.5, ["\u2028"], {"x": "y" * 300_000}):
        assert process.call(request) == [{"a": [1, None, "é🙂"]}, request]


def test_what_the_target_refuses_is_refused_here(make: Make) -> None:
    process = make("refusing")
    with pytest.raises(RequestError, match="that is not this") as caught:
        process.call("refused")
    assert (caught.value.param, caught.value.code) == ("that", "no_such_thing")
    assert renamed(caught.value.message, {"that": "it"}) == "it is not this"
    with pytest.raises(RequestError, match="JSON data"):
        process.call(object())
    with pytest.raises(ModelError, match="this setup is bad"):
        make("refusing", "bad").call(None)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("spin", "0.5 s of processor time"),
        ("eat", "64 MiB of memory"),
        ("shout", "3000000 bytes of output; at most 1048576"),
        ("fail", "LookupError: what a target does not expect"),
    ],
)
def test_work_over_a_limit_is_stopped_and_the_next_request_is_served(make: Make, request_: str, why: str) -> None:
    process = make("refusing")
    with pytest.raises(Stopped, match=why):
        process.call(request_)
    assert process.call("fine") == "fine"


def test_a_call_whose_process_is_killed_says_so(make: Make) -> None:
    process = make("refusing", cpu=100.0)
    assert process.call("fine") == "fine"
    why: list[str] = []

    def spin() -> None:
        with pytest.raises(Stopped) as caught:
            process.call("spin")
        why.append(str(caught.value))

    thread = threading.Thread(target=spin)
    thread.start()
    until(lambda: process._calling)
    process.kill()
    thread.join()
    assert why[0] in ("its process ended with status -9", "it was killed")
    assert process.call("fine") == "fine"


def test_a_kill_before_there_is_a_child_ends_the_call_and_a_kill_without_a_call_ends_none(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = make("refusing", cpu=100.0)
    starts = process._start

    def start() -> Any:
        process.kill()
        return starts()

    with monkeypatch.context() as patched:
        patched.setattr(process, "_start", start)
        with pytest.raises(Stopped, match="it was killed"):
            process.call("spin")
    process.kill()
    assert process.call("fine") == "fine"
    process.kill()
    assert process.call("fine") == "fine"


def test_deep_work_has_the_stack_that_it_is_given(make: Make) -> None:
    assert make("deep", 1_000_000, stack=512 << 20, memory=1 << 30, cpu=60.0).call(20_000) == 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has seccomp")
@pytest.mark.parametrize("stack", [0, 16 << 20], ids=["on the main thread", "on a thread with a stack"])
def test_a_sealed_process_reaches_nothing(make: Make, stack: int) -> None:
    met = make("escaping", os.getpid(), stack=stack, cpu=10.0).call(None)
    assert {attempt: error for attempt, error in met.items() if not error} == {}
    assert met["read a file"] in ("PermissionError", "OSError")
    assert not Path("/tmp/penstock-escaped").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_an_undumpable_process_says_so() -> None:
    """Root may read it all the same, so the kernel's own word on it is looked at (PR_GET_DUMPABLE)."""
    program = (
        "import ctypes; from engine.confined.seal import make_undumpable; "
        "make_undumpable(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "0\n"
