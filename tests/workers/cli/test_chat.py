"""`penstock chat`: through pipes and on a terminal, with a gateway that is running and with one of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NoReturn

import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.record import Record
from tests.in_process import unchanged
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, until
from tests.waiting import PATIENCE_S
from tests.workers.cli.conftest import Answer, Ran, Run, Scripted, send
from workers.cli.exits import Failure
from workers.cli.run import _about, _gateway

PENSTOCK = (sys.executable, "-m", "workers.cli")
SERVED = {"id": "tiny", "capabilities": ["generate", "chat"]}
BREAKS_OFF = "(breaks off)"
CUT = "(cut)"


class Answers:
    """A gateway that serves `tiny` and answers chats with what it is told to; the requests are in `asked`."""

    def __init__(self, scripted: Scripted, *answers: list[str | dict[str, Any]]) -> None:
        self.asked: list[dict[str, Any]] = []
        scripted.answers = [self._models(SERVED), *(self._answer(pieces) for pieces in answers)]
        self.url = scripted.url

    def _models(self, *served: dict[str, Any]) -> Answer:
        return send(200, json.dumps({"data": served}).encode())

    def _answer(self, pieces: list[str | dict[str, Any]]) -> Answer:
        """BREAKS_OFF as the last piece: nothing comes after it. CUT: the answer ends for its length."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            self.asked.append(json.loads(request.rfile.read(int(request.headers["content-length"]))))
            chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
            whole = pieces[-1:] != [BREAKS_OFF]
            cut = pieces[-1:] == [CUT]
            for piece in pieces[:-1] if cut or not whole else pieces:
                chunk = {"choices": [{"index": 0, "delta": {"content": piece}}]} if isinstance(piece, str) else piece
                chunks.append(chunk)
            if whole:
                chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if cut else "stop"}]})
            body = b": still here\n\n" + b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks)
            send(200, body + (b"data: [DONE]\n\n" if whole else b""))(request)

        return answer


def _nothing_to_start(models: list[str]) -> NoReturn:
    raise Failure("nothing to start")


@pytest.fixture
def chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `penstock chat` with these lines on standard input."""

    def command(url: str, lines: str, *args: str) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run("chat", "tiny", "--url", url, *args)

    return command


def said(asked: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in asked["messages"]]


class TestConversation:
    def test_is_sent_whole_each_time(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        gateway = Answers(scripted, ["One", " two."], ["Three."])
        ran = chat(gateway.url, "first\n\nsecond\n")
        assert (ran.status, ran.out, ran.err) == (0, "One two.\nThree.\n", "")
        assert said(gateway.asked[0]) == [("user", "first")]
        assert said(gateway.asked[1]) == [("user", "first"), ("assistant", "One two."), ("user", "second")]

    def test_begins_with_the_system_message_and_goes_on_with_another(
        self, chat: Callable[..., Ran], scripted: Scripted
    ) -> None:
        gateway = Answers(scripted, ["a"], ["b"], ["c"])
        ran = chat(gateway.url, "1\n/system Be  kind.\n2\n/system\n3\n", "--system", "Be brief.")
        assert ran.err == "(the system message is set)\n(there is no system message)\n"
        assert [said(asked)[0] for asked in gateway.asked] == [
            ("system", "Be brief."),
            ("system", "Be  kind."),
            ("user", "1"),
        ]

    def test_is_forgotten_when_asked(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        gateway = Answers(scripted, ["a"], ["b"])
        chat(gateway.url, "1\n/reset\n2\n")
        assert said(gateway.asked[1]) == [("user", "2")]

    def test_ends_with_exit_whatever_comes_behind(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        gateway = Answers(scripted, ["a"])
        assert chat(gateway.url, "/help\n/frobnicate\n/exit\n1\n").status == 0
        assert gateway.asked == []

    def test_has_the_sampling_that_was_asked_for_and_leaves_the_rest(
        self, chat: Callable[..., Ran], scripted: Scripted
    ) -> None:
        gateway = Answers(scripted, ["a"])
        chat(gateway.url, "1\n", "--temperature", "0.5", "--max-tokens", "7", "--seed", "3", "--stop", "x")
        asked = gateway.asked[0]
        del asked["messages"], asked["stream_options"]
        assert asked == {
            "model": "tiny", "stream": True, "temperature": 0.5, "max_tokens": 7, "seed": 3, "stop": ["x"],
        }  # fmt: skip

    def test_goes_on_from_a_file(self, chat: Callable[..., Ran], scripted: Scripted, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        chat(Answers(scripted, ["é"]).url, f"1\n/save {file}\n", "--system", "Be brief.")
        gateway = Answers(scripted, ["b"])
        ran = chat(gateway.url, f"/load\n/load {file}\n2\n/bye\n3\n")
        assert ran.err.splitlines()[0] == "(/load needs the name of a file)"
        assert "(2 messages are read from" in ran.err
        expected = [("system", "Be brief."), ("user", "1"), ("assistant", "é"), ("user", "2")]
        assert said(gateway.asked[0]) == expected

    def test_is_not_read_from_what_is_none(self, chat: Callable[..., Ran], scripted: Scripted, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        for content in ("", "[]", '{"messages": 7, "system": null}'):
            file.write_text(content)
            ran = chat(Answers(scripted).url, f"/load {file}\n")
            assert (ran.status, "holds no conversation" in ran.err) == (2, True)
        assert "cannot read" in chat(Answers(scripted).url, f"/load {tmp_path}/none\n").err

    def test_takes_a_message_of_several_lines(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        gateway = Answers(scripted, ["a"], ["b"])
        chat(gateway.url, '"""def f():\n  /help\n"""\n"""one"""\n')
        assert [said(asked)[-1][1] for asked in gateway.asked] == ["def f():\n  /help", "one"]

    @pytest.mark.parametrize(("defaults", "sent"), [({}, 0.7), ({"top_p": 0.9}, 0.7), ({"temperature": 0.2}, None)])
    def test_has_the_model_s_own_temperature_else_a_mild_one(
        self, chat: Callable[..., Ran], scripted: Scripted, defaults: dict[str, Any], sent: float | None
    ) -> None:
        gateway = Answers(scripted, ["a"])
        scripted.answers[0] = gateway._models({**SERVED, "defaults": defaults})
        chat(gateway.url, "1\n")
        assert gateway.asked[0].get("temperature") == sent

    def test_has_a_limit_where_none_was_set_and_says_that_it_cut(
        self, chat: Callable[..., Ran], scripted: Scripted
    ) -> None:
        gateway = Answers(scripted, ["a", CUT], ["b"])
        ran = chat(gateway.url, "1\n2\n")
        assert [asked["max_tokens"] for asked in gateway.asked] == [1024, 1024]
        assert ran.err == "(cut at the output's limit; --max-tokens sets another)\n"

    def test_goes_on_in_the_room_that_is_left_where_the_limit_is_more(
        self, chat: Callable[..., Ran], door: Door, worker: FakeWorker, valkey: Redis
    ) -> None:
        served: list[int | None] = []

        def serve() -> None:
            task_id = until(lambda: worker.take(QUEUE))
            served.append(Record.parse(task_id, valkey.hgetall(keys.task(task_id))).json("task").get("max_tokens"))
            worker.serve(task_id, ["an", "swer"])

        serving = threading.Thread(target=serve)
        serving.start()
        ran = chat(door.url, "1\n")
        serving.join(PATIENCE_S)
        assert (ran.status, ran.out, served) == (0, "answer\n", [None])

    @pytest.mark.parametrize("status", [200, 401])
    def test_an_api_key_goes_only_where_a_url_was_given(
        self,
        scripted: Scripted,
        status: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        sent: list[str | None] = []
        error = {"message": "m", "type": "t", "param": None, "code": "missing_api_key"}
        body = json.dumps({"data": [SERVED], "error": error}).encode()

        def answer(request: BaseHTTPRequestHandler) -> None:
            sent.append(request.headers["authorization"])
            send(status, body)(request)

        scripted.answers = [answer] * 2
        monkeypatch.setenv("PENSTOCK_API_KEY", "psk_secret")
        monkeypatch.setattr("workers.cli.run.find_models", _nothing_to_start)
        with suppress(Failure), _gateway("tiny", scripted.url, named=False) as (found, _):
            found.models()
        assert sent == [None, None][: 2 if status == 200 else 1]
        told = f"asks for an API key, which is sent to it with --url {scripted.url}"
        assert (told in capsys.readouterr().err) == (status == 401)
        scripted.answers = [answer]
        with suppress(Failure), _gateway("tiny", scripted.url, named=True) as (found, _):
            found.models()
        assert sent[-1] == "Bearer psk_secret"

    def test_is_with_the_usual_gateway_where_that_serves_the_model(self, scripted: Scripted) -> None:
        gateway = Answers(scripted)
        with _gateway("tiny", gateway.url, named=False) as (found, name):
            assert (found.url, name) == (gateway.url, "tiny")

    def test_an_answer_s_speed_and_cut_are_told(self) -> None:
        assert _about({"usage": {"completion_tokens": 11}, "finish_reason": "length"}, 2.0) == (
            "(11 tokens, 5.0 a second; cut at the output's limit; --max-tokens sets another)"
        )
        assert _about({"usage": {"completion_tokens": 1}}, 0.0) == "(1 tokens)"
        assert _about({}, 1.0) == ""


class TestFailure:
    def test_within_an_answer_is_one_of_the_command(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        broken = {"error": {"message": "The engine failed.", "type": "server_error", "code": "engine_error"}}
        ran = chat(Answers(scripted, ["begun", broken]).url, "1\n2\n")
        assert (ran.status, ran.out, ran.err) == (3, "begun\n", "penstock: The engine failed.\n")

    def test_of_the_connection_is_no_end_of_an_answer(self, chat: Callable[..., Ran], scripted: Scripted) -> None:
        ran = chat(Answers(scripted, ["begun", BREAKS_OFF]).url, "1\n2\n")
        assert (ran.status, ran.out) == (3, "begun\n")
        assert ran.err == f"penstock: the answer from {scripted.url} broke off\n"

    def test_of_standard_input_is_said(self, run: Run, monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n\xff\n"), "utf-8"))
        answers = Answers(scripted, ["one"])
        ran = run("chat", "tiny", "--url", answers.url)
        assert (ran.status, len(answers.asked)) == (2, ran.out.count("one"))
        assert ran.err.startswith("penstock: standard input is not text in UTF-8")

    def test_of_the_gateway_is_said(self, chat: Callable[..., Ran]) -> None:
        ran = chat("http://127.0.0.1:1", "1\n")
        assert ran.status == 3
        assert "no answer from http://127.0.0.1:1" in ran.err

    @pytest.mark.parametrize(
        ("served", "says"),
        [
            ({**SERVED, "id": "other"}, "serves no model 'tiny'; it has: other"),
            ({**SERVED, "capabilities": ["generate"]}, "tiny has no chat template"),
            ({**SERVED, "capabilities": ["embed"]}, "tiny generates no text; it can embed"),
        ],
    )
    def test_of_a_model_that_cannot_chat_is_said(
        self, chat: Callable[..., Ran], scripted: Scripted, served: dict[str, Any], says: str
    ) -> None:
        gateway = Answers(scripted)
        scripted.answers = [gateway._models(served)]
        ran = chat(gateway.url, "1\n")
        assert ran.status == 2
        assert says in ran.err

    def test_by_the_real_gateway_has_its_message(self, chat: Callable[..., Ran], door: Door) -> None:
        ran = chat(door.url, "1\n", "--temperature", "-1")
        assert ran.status == 2
        assert "temperature" in ran.err

    def test_of_a_conversation_that_is_too_long_says_how_to_begin_anew(
        self, chat: Callable[..., Ran], scripted: Scripted
    ) -> None:
        full = {"error": {"message": "This model's maximum context length is 4 tokens."}}
        ran = chat(Answers(scripted, ["all", "of it"], [full]).url, "1\n2\n")
        assert ran.err.strip().endswith("is 4 tokens. /reset starts a new conversation.")


#: Makes standard input the terminal from which a new session's Ctrl-C comes, and becomes the command.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """`penstock chat` on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *PENSTOCK, "chat", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 4096):
                self.shown += data.decode()
        except OSError:  # its other side is closed
            pass

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        until(lambda: self.shown.count(text) >= times)

    def close(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        os.close(self._ours)
        return status


@pytest.fixture
def terminal(door: Door) -> Iterator[Terminal]:
    made = Terminal("tiny", "--url", door.url)
    yield made
    made.process.kill()


def test_ctrl_c_stops_the_answer_and_its_task_and_the_chat_goes_on(
    terminal: Terminal, worker: FakeWorker, valkey: Redis
) -> None:
    def status(task_id: str) -> str:
        return Record.parse(task_id, valkey.hgetall(keys.task(task_id))).status

    terminal.wait_for("> ")
    terminal.type("hello\n")
    first = until(lambda: worker.take(QUEUE))
    worker.claim(first)
    worker.append(first, 0, ["some", "thing"])
    terminal.wait_for("something")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    until(lambda: valkey.hget(keys.task(first), "cancel") or status(first) == "cancelled")
    terminal.wait_for("> ", 2)
    terminal.type("again\n")
    worker.serve(until(lambda: worker.take(QUEUE)), ["an", "swer"])
    terminal.wait_for("answer")
    terminal.wait_for("> ", 3)
    terminal.type("\x03")
    terminal.wait_for("(/exit or Ctrl-D leaves)")
    terminal.wait_for("> ", 4)
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_gateway_it_serves_the_model_itself_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    settings = ("--max-tokens", "12", "--temperature", "0")
    own = subprocess.Popen(
        [*PENSTOCK, "chat", "tiny", *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert own.stdin is not None
    assert own.stdout is not None
    own.stdin.write("What is os?\n/reset\nWhat is os?\n")
    own.stdin.flush()
    with unchanged():
        alone = run("run", "tiny", "What is os?", "--chat", *settings)
    assert own.stdout.read(2 * len(alone.out)) == 2 * alone.out != ""
    own.terminate()  # as when its terminal is closed
    own.communicate(timeout=240)
    assert own.returncode == 130
    assert list(tmp_path.iterdir()) == []
