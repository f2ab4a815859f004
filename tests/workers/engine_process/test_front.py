"""The worker's side of an engine's process: no call waits for it, and what it says is what an engine says."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import AdapterRoomError, EngineError, ModelError, RequestError
from engine.params import SamplingParams
from engine.request import Event, Request
from tests.stub_engine import STALLED, token
from tests.waiting import PATIENCE_S, gone, suspend, until
from workers.engine_process.child import Child
from workers.engine_process.front import ProcessEngine
from workers.engine_process.ring import Ring

#: Much more than a socket holds.
LONG = [1] * 100_000


@pytest.fixture
def begin() -> Iterator[Callable[[str], ProcessEngine]]:
    engines: list[ProcessEngine] = []

    def load(factory: str) -> ProcessEngine:
        engines.append(ProcessEngine("w", patience=300.0))
        engines[-1].load(factory, "stub", {})
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()
        assert gone(engine.pid)


def request(name: str, prompt: list[int] | None = None, tokens: int = 4) -> Request:
    return Request(name, prompt or [1], SamplingParams(max_tokens=tokens, seed=7))


def ended(events: list[Event]) -> bool:
    return bool(events) and events[-1].done


def test_no_call_waits_for_a_process_that_does_nothing(begin: Callable[[str], ProcessEngine]) -> None:
    engine = begin("tests.workers.engine_process.engines:spacious")
    suspend(engine.pid)
    every: list[list[Event]] = [[] for _ in range(8)]
    for number, events in enumerate(every):
        engine.submit(request(str(number), LONG), events.append)
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("3"), print)
    assert engine.abort("3")
    assert not engine.abort("3")
    os.kill(engine.pid, signal.SIGCONT)
    assert until(lambda: all(ended(events) for number, events in enumerate(every) if number != 3))
    assert every[3] == []
    assert [event.token_ids for event in every[0]] == [[token(7, 0, index)] for index in range(4)]


def test_a_step_that_does_not_end_is_seen_with_its_requests(
    begin: Callable[[str], ProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_HUNG_BY", str(STALLED))
    monkeypatch.setenv("STUB_HANG_S", "0.5")
    engine = begin("tests.stub_engine:load")
    engine.submit(request("hung", [STALLED]), print)
    until(lambda: engine.stepping()[1] == {"hung"})
    assert engine.abort("hung")


def test_a_process_without_a_sign_of_life_counts_as_a_step_that_hangs(begin: Callable[[str], ProcessEngine]) -> None:
    engine = begin("tests.stub_engine:load")
    until(lambda: engine._ring.beat)
    suspend(engine.pid)
    engine._ring.beat -= 60
    assert engine.stepping()[0] > 50
    os.kill(engine.pid, signal.SIGCONT)


def test_adapters_are_loaded_there_and_refused_as_here(begin: Callable[[str], ProcessEngine]) -> None:
    engine = begin("tests.workers.engine_process.engines:adapting")
    assert engine.load_adapter("small", "/").nbytes == 1
    with pytest.raises(AdapterRoomError, match="no room") as refusal:
        engine.load_adapter("large", "/")
    assert refusal.value.nbytes == 7
    with pytest.raises(ModelError, match="no adapter"):
        engine.load_adapter("broken", "/")
    assert list(engine.adapters) == ["small"]
    assert engine.unload_adapter("small")
    assert not engine.unload_adapter("small")
    assert engine.adapters == {}


def test_what_a_process_made_before_it_died_is_delivered_before_it_is_said_to_be_lost(
    begin: Callable[[str], ProcessEngine],
) -> None:
    engine = begin("tests.stub_engine:load")
    delivered: list[Event | str] = []
    free = threading.Event()

    def deliver(event: Event) -> None:
        delivered.append(event)
        assert free.wait(PATIENCE_S)

    engine.on_lost = lambda why, suspects: delivered.append(why)
    engine.submit(request("long", tokens=4000), deliver)
    until(lambda: engine._ring.unread > 5_000)  # dozens of steps
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: gone(engine.pid))
    free.set()
    until(lambda: isinstance(delivered[-1], str))
    *events, lost = delivered
    assert [event.index for event in events if isinstance(event, Event)] == list(range(len(events)))
    assert len(events) > 20
    assert "was killed by SIGKILL" in str(lost)


def test_without_an_owner_the_requests_of_a_process_that_dies_end_in_an_error(
    begin: Callable[[str], ProcessEngine],
) -> None:
    engine = begin("tests.stub_engine:load")
    events: list[Event] = []
    engine.submit(request("stalled", [STALLED]), events.append)
    os.kill(engine.pid, signal.SIGKILL)
    assert until(lambda: ended(events))
    assert "was killed by SIGKILL" in str(events[-1].error)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request("late"), print)


def test_what_comes_to_an_engine_that_is_lost_has_no_end_of_its_own(begin: Callable[[str], ProcessEngine]) -> None:
    """Its worker hands it back, as all others."""
    engine = begin("tests.workers.engine_process.engines:closed")
    late: list[Event] = []
    events: list[Event] = []
    engine.submit(request("late"), late.append)
    engine.submit(request("one"), events.append)
    until(lambda: ended(events))
    assert late == []


def test_an_engine_that_was_lost_before_its_owner_listens_is_found_to_be(begin: Callable[[str], ProcessEngine]) -> None:
    engine = begin("tests.stub_engine:load")
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: engine._end)
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        engine.share(print, print)


def test_a_form_that_kills_the_process_is_suspected_though_no_step_had_it(
    begin: Callable[[str], ProcessEngine],
) -> None:
    engine = begin("tests.workers.engine_process.engines:formless")
    lost: list[set[str]] = []
    engine.on_lost = lambda why, suspects: lost.append(suspects)
    suspend(engine.pid)
    engine.submit(Request("form", [1], SamplingParams(max_tokens=4, regex="a*")), print)
    engine.submit(request("other"), print)
    os.kill(engine.pid, signal.SIGCONT)
    until(lambda: lost)
    assert lost == [{"form"}]


def test_a_process_whose_worker_was_refused_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    engine = ProcessEngine("w", patience=300.0)
    engine._socket.shutdown(socket.SHUT_WR)
    assert "with status 0" in until(lambda: engine._end)
    engine.close()
    assert capfd.readouterr().err == ""


class Ending(dict[str, int]):
    """Its entries go as soon as they were read, as if another thread had removed them."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.pop(name, default)


def test_a_request_may_end_while_it_is_withdrawn() -> None:
    ours, theirs = socket.socketpair()
    aborted: list[str] = []
    process = Child(Ring(), theirs)
    process._engine = SimpleNamespace(abort=aborted.append)
    process._numbers = Ending(a=1)
    process._abort(1, "a")
    assert aborted == ["a"]
    ours.close()
