"""`submit`, `tail`, `result`, `cancel`, `tasks` against a real gateway: what they print, and their exit status."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from engine.grammar.schema import bounded
from engine.text import ChatTemplate, Tokenizer
from producers.client import listing
from producers.connection import script
from producers.contract import keys
from producers.contract.record import Record
from producers.gateway import estimates, wait_reasons
from producers.gateway.tasks import routes
from producers.store import protocol
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, until
from tests.producers.gateway.tasks.test_explain import MEASURED, NAME, lease
from tests.workers.cli.conftest import Ran, Run, Scripted, send
from workers.cli import client
from workers.cli.client import Gateway
from workers.cli.terminal import WaitNotes


def task_of(valkey: Redis, task_id: str) -> dict[str, object]:
    return Record.parse(task_id, valkey.hgetall(keys.task(task_id))).task


def started(work: Callable[[], None]) -> threading.Thread:
    """A thread that does it, for the test to join: its server ends with the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def served(worker: FakeWorker, *pieces: str) -> threading.Thread:
    """A worker that serves the next task, whenever it comes."""
    return started(lambda: worker.serve(until(lambda: worker.take(QUEUE)), pieces))


def submitted(penstock: Run, *args: str) -> str:
    ran = penstock("submit", "tiny", "def f", *args)
    assert (ran.status, ran.err) == (0, "")
    return ran.out.strip()


class TestSubmit:
    def test_prints_the_id_and_nothing_else(self, penstock: Run, valkey: Redis) -> None:
        assert valkey.exists(keys.task(submitted(penstock)))

    def test_sends_every_option_and_leaves_the_others_to_the_gateway(self, penstock: Run, valkey: Redis) -> None:
        options = "--tier flex --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --seed 7"
        options += " --stop a --stop b --ignore-eos -n 2 --logprobs 1 --timeout 60 --tenant t"
        options += " --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty -0.4"
        options += (
            " --typical-p 0.8 --logit-bias 5=-100 --logit-bias 6=1.5 --allow-token 5 --allow-token 6 --ban-token 7"
        )
        options += " --bad-word x --bad-word y --stop-token 9 --include-stop --best-of 3 --prompt-logprobs 2"
        options += ' --json-schema {"properties":{}} --open-objects'
        options += " --metadata k=v=w --metadata l= --ttl 120"
        task = task_of(valkey, submitted(penstock, *options.split()))
        asked = {
            "model": "tiny",
            "tier": "flex",
            "max_tokens": 9,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": -0.4,
            "typical_p": 0.8,
            "logit_bias": {"5": -100.0, "6": 1.5},
            "allowed_token_ids": [5, 6],
            "banned_token_ids": [7],
            "bad_words": ["x", "y"],
            "json_schema": bounded({"properties": {}}, open_objects=True).schema,
            "stop_token_ids": [9],
            "include_stop": True,
            "best_of": 3,
            "prompt_logprobs": 2,
            "seed": 7,
            "stop": ["a", "b"],
            "ignore_eos": True,
            "n": 2,
            "logprobs": 1,
            "timeout": 60.0,
            "tenant": "t",
            "metadata": {"k": "v=w", "l": ""},
            "ttl": 120,
        }
        assert {name: task[name] for name in asked} == asked
        chosen = task_of(valkey, submitted(penstock, "--choice", "yes", "--choice", "no"))
        assert chosen["grammar"] == 'start: CHOICE\nCHOICE: "yes" | "no"'
        plain = task_of(valkey, submitted(penstock))
        assert plain["temperature"] == 0.7, "the model's own"
        assert not {"max_tokens", "tier"} & plain.keys()

    def test_reads_the_prompt_from_standard_input(
        self, penstock: Run, valkey: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("def f"))
        ran = penstock("submit", "tiny", "-")
        assert task_of(valkey, ran.out.strip())["prompt"] == task_of(valkey, submitted(penstock))["prompt"]

    def test_sends_the_prompt_as_a_user_s_message(self, penstock: Run, valkey: Redis) -> None:
        folder = Path(__file__).parents[3] / "workers" / "models" / "tiny"
        template = ChatTemplate.from_folder(folder)
        assert template is not None
        text = template.render([{"role": "user", "content": "def f"}])
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode(text, add_special_tokens=False)
        for form, expected in ((), ids), (("--chat",), ids), (("--raw",), tokenizer.encode("def f")):
            assert task_of(valkey, submitted(penstock, *form))["prompt"] == expected

    def test_a_model_without_a_chat_template_continues_the_text(self, penstock: Run, valkey: Redis) -> None:
        card = json.loads(valkey.hget(keys.MODELS, "tiny") or "")
        valkey.hset(keys.MODELS, "base", json.dumps({**card, "name": "base", "capabilities": ["generate"]}))
        ran = penstock("submit", "base", "def f")
        assert task_of(valkey, ran.out.strip())["prompt"] == task_of(valkey, submitted(penstock, "--raw"))["prompt"]

    def test_an_output_without_text_is_told(self, penstock: Run, worker: FakeWorker) -> None:
        serving = served(worker)
        ran = penstock("submit", "tiny", "def f", "--stream")
        serving.join()
        assert (ran.status, ran.out) == (0, "")
        task, note = ran.err.splitlines()
        assert note == "(the model ended without any text)"
        again = penstock("result", task.removeprefix("task "))
        assert (again.status, again.err.splitlines()) == (0, [note])

    def test_an_output_that_was_cut_is_told(self, penstock: Run, worker: FakeWorker) -> None:
        def serve() -> None:
            task_id = until(lambda: worker.take(QUEUE))
            worker.claim(task_id)
            worker.append(task_id, 0, ["a"], finish_reason="length")
            worker.finish(task_id, [1], reasons=["length"])

        serving = started(serve)
        ran = penstock("submit", "tiny", "def f", "--stream")
        serving.join()
        task, note = ran.err.splitlines()
        assert (ran.out, note) == ("a\n", "(cut: --max-tokens or the end of the model's context was reached)")
        task_id = task.removeprefix("task ")
        assert penstock("result", task_id).err.splitlines() == [note]
        assert penstock("tail", task_id, "--json").err == penstock("result", task_id, "--json").err == ""

    def test_streams_the_text_as_it_is(self, penstock: Run, worker: FakeWorker) -> None:
        serving = served(worker, "(x):\n", "    return \x1b[31m", "é\u2028")
        ran = penstock("submit", "tiny", "def f", "--stream")
        serving.join()
        assert (ran.status, ran.out) == (0, "(x):\n    return \x1b[31mé\u2028\n")
        assert ran.err.startswith("task ")

    def test_streams_json_lines(self, penstock: Run, worker: FakeWorker) -> None:
        serving = served(worker, "a", "b")
        ran = penstock("submit", "tiny", "def f", "--stream", "--json")
        serving.join()
        events = [json.loads(line) for line in ran.out.splitlines()]
        assert [(event["event"], event["position"]) for event in events] == [("token", 0), ("token", 1), ("end", 2)]
        assert ran.err == ""

    def test_prints_the_task_as_json(self, penstock: Run) -> None:
        task = json.loads(penstock("submit", "tiny", "def f", "--json").out)
        assert (task["object"], task["status"]) == ("task", "queued")

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("huge", "x"), 'There is no model "huge"; models here: tiny'),
            (("tiny", ""), "prompt is empty"),
            (("tiny", "x", "--temperature", "-1"), "temperature is -1"),
            (("tiny", "x", "--tier", "gold"), 'tier is "gold"'),
            (("tiny", "x", "--metadata", "k"), "--metadata is 'k'; it must be KEY=TEXT"),
            (("tiny", "x", "--max-tokens", "many"), "as an integer"),
            (("tiny",), "'PROMPT'"),
            (("tiny", "x", "--url", "gopher://x"), "is not a gateway's URL"),
        ],
    )
    def test_says_what_is_wrong_with_status_2(
        self, penstock: Run, valkey: Redis, args: tuple[str, ...], says: str
    ) -> None:
        before = valkey.dbsize()
        ran = penstock("submit", *args)
        assert (ran.status, ran.out) == (2, "")
        assert says in " ".join(ran.err.split())
        assert valkey.dbsize() == before

    def test_without_a_gateway_says_what_to_do_with_status_3(self, run: Run) -> None:
        ran = run("submit", "tiny", "x", "--url", "http://127.0.0.1:1")
        assert ran.status == 3
        assert "penstock up" in ran.err

    def test_of_a_task_that_fails_has_status_1(self, penstock: Run, worker: FakeWorker) -> None:
        def fail() -> None:
            task_id = until(lambda: worker.take(QUEUE))
            worker.claim(task_id)
            worker.append(task_id, 0, ["a"])
            worker.finish(task_id, [1], status="failed", reasons=[], error={"code": "c", "message": "It broke."})

        serving = started(fail)
        ran = penstock("submit", "tiny", "def f", "--stream")
        serving.join()
        assert (ran.status, ran.out) == (1, "a\n")
        assert ran.err.rstrip().endswith("failed: It broke.")


class TestTail:
    def test_begins_at_any_position(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock)
        worker.serve(task_id, list("abc"))
        assert [penstock("tail", task_id, "--from", str(start)).out for start in range(5)] == [
            "abc\n",
            "bc\n",
            "c\n",
            "",
            "",
        ]

    def test_shows_several_outputs_one_after_the_other(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock, "-n", "3")
        worker.claim(task_id)
        for step, reason in enumerate([None, "length"]):
            for choice in range(2):
                worker.append(task_id, step, [f"{choice}{step}"], choice=choice, finish_reason=reason)
        worker.append(task_id, 0, ["cut"], choice=2)
        worker.finish(task_id, [2, 2, 1], reasons=["length", "length", "stop"])
        assert (
            penstock("tail", task_id).out
            == "--- 0 (length) ---\n0001\n--- 1 (length) ---\n1011\n--- 2 (None) ---\ncut\n"
        )

    def test_of_an_unknown_id_has_status_2(self, penstock: Run) -> None:
        ran = penstock("tail", "nobody")
        assert (ran.status, ran.out) == (2, "")
        assert "There is no task nobody" in ran.err

    def test_interrupted_leaves_the_task_and_says_how_to_go_on(
        self, penstock: Run, worker: FakeWorker, valkey: Redis
    ) -> None:
        task_id = submitted(penstock)
        worker.claim(task_id)
        worker.append(task_id, 0, ["a", "b"])
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", "tail", task_id],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ,
        )
        assert process.stdout is not None
        assert process.stdout.read(2) == b"ab"  # before any line has ended
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130
        assert f"penstock tail {task_id} --from 2" in err.decode()
        assert not valkey.hexists(keys.task(task_id), "cancel")


class TestResult:
    def test_waits_for_the_end_and_prints_the_text(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock)
        serving = served(worker, "a", "b")
        assert penstock("result", task_id) == Ran(0, "ab\n", "")
        serving.join()

    def test_that_is_interrupted_names_the_command_that_goes_on(
        self, penstock: Run, monkeypatch: pytest.MonkeyPatch, progress_texts: list[str]
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        task_id = submitted(penstock)
        monkeypatch.setattr(Gateway, "waited", interrupted)
        ran = penstock("result", task_id)
        assert (ran.status, progress_texts) == (130, [f"queued (why: penstock explain {task_id})"])
        assert f"the task goes on: penstock result {task_id}" in ran.err

    def test_and_tail_say_when_it_ends_where_workers_have_measured_that(
        self,
        penstock: Run,
        valkey: Redis,
        valkey_url: str,
        worker: FakeWorker,
        monkeypatch: pytest.MonkeyPatch,
        progress_texts: list[str],
    ) -> None:
        valkey.hset(keys.PROFILES, NAME, MEASURED.to_json())
        lease(valkey_url, running=0)
        monkeypatch.setattr(estimates, "LIMIT_S", 60.0)  # the machine may be busy
        monkeypatch.setattr(wait_reasons, "READ_S", 60.0)
        events = Gateway.events

        serving: list[threading.Thread] = []

        def waited(self: Gateway, task_id: str, _: float) -> dict[str, Any]:
            served(worker, "a").join()
            return self.task(task_id)

        def followed(self: Gateway, *args: Any, **options: Any) -> Any:
            serving.append(served(worker, "b"))
            return events(self, *args, **options)

        monkeypatch.setattr(Gateway, "waited", waited)
        monkeypatch.setattr(Gateway, "events", followed)
        assert penstock("result", submitted(penstock, "--max-tokens", "100")).out == "a\n"
        assert progress_texts[0].startswith("queued, ends in about ")
        ran = penstock("tail", submitted(penstock, "--max-tokens", "100"))
        serving.pop().join()
        assert ran.out == "b\n"
        assert re.search(r"The task ends in about [01]\.\d s, in 9 of 10 cases within [01]\.\d s\.", ran.err)

    def test_says_what_the_task_waits_for(
        self, penstock: Run, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task_id, told = submitted(penstock), WaitNotes.show

        def show(self: WaitNotes, text: str) -> None:
            told(self, text)
            if worker.take(QUEUE) is not None:
                worker.serve(task_id, ["a"])

        monkeypatch.setattr(routes, "EXPLAIN_S", 0.6)
        monkeypatch.setattr(WaitNotes, "show", show)
        ran = penstock("result", task_id)
        assert (ran.status, ran.out) == (0, "a\n")
        assert ran.err.startswith("(waits for: no worker serves tiny@")
        assert ran.err.count("\n") == 1

    def test_asks_again_where_the_gateway_has_no_room_for_who_waits(
        self, penstock: Run, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "PAUSE_S", 0)
        task = {"id": "a", "status": "queued"}
        full = {"error": {"message": "m", "type": "t", "param": None, "code": "too_many_streams"}}
        ended = {**task, "status": "completed", "error": None}
        ended["choices"] = [{"index": 0, "text": "b", "finish_reason": "stop"}]
        answers = ((200, task), (429, full), (200, task), (200, ended))
        scripted.answers = [send(status, json.dumps(body).encode()) for status, body in answers]
        assert penstock("result", "a", "--url", scripted.url) == Ran(0, "b\n", "")

    def test_prints_the_task_as_json(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock)
        worker.serve(task_id, ["a"])
        task = json.loads(penstock("result", task_id, "--json").out)
        assert (task["id"], task["choices"][0]["token_ids"]) == (task_id, [0])

    def test_gives_up_after_the_timeout_with_status_4(self, penstock: Run) -> None:
        task_id = submitted(penstock)
        for timeout in ("0", "0.05"):
            ran = penstock("result", task_id, "--timeout", timeout)
            assert (ran.status, ran.out) == (4, "")
            assert "still queued" in ran.err

    def test_of_a_cancelled_task_has_status_1(self, penstock: Run) -> None:
        task_id = submitted(penstock)
        penstock("cancel", task_id)
        ran = penstock("result", task_id, "--json")
        assert ran.status == 1
        assert json.loads(ran.out)["status"] == "cancelled"
        assert "was cancelled" in ran.err

    def test_several_outputs_have_a_heading_each(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock, "-n", "2")
        worker.claim(task_id)
        for choice in range(2):
            worker.append(task_id, 0, [f"x{choice}"], choice=choice)
        worker.finish(task_id, [1, 1])
        assert penstock("result", task_id).out == "--- 0 (stop) ---\nx0\n--- 1 (stop) ---\nx1\n"


class TestCancel:
    def test_may_be_asked_for_twice(self, penstock: Run) -> None:
        task_id = submitted(penstock)
        assert penstock("cancel", task_id) == Ran(0, f"{task_id} is cancelled\n", "")
        ran = penstock("cancel", task_id, "--json")
        told = json.loads(ran.out)
        assert (ran.status, told["accepted"], told["status"]) == (0, True, "cancelled")

    def test_comes_too_late_for_what_has_ended(self, penstock: Run, worker: FakeWorker) -> None:
        task_id = submitted(penstock)
        worker.serve(task_id)
        ran = penstock("cancel", task_id)
        assert ran.status == 1
        assert "is completed already" in ran.err

    def test_of_an_unknown_id_has_status_2(self, penstock: Run) -> None:
        assert penstock("cancel", "nobody").status == 2


def test_a_stream_goes_on_with_another_gateway_at_the_same_place(penstock: Run, door: Door, worker: FakeWorker) -> None:
    """The gateway ends its streams, as it does when it stops; the command comes back for the rest."""
    task_id = submitted(penstock)
    worker.claim(task_id)
    worker.append(task_id, 0, ["a"])

    def go_on() -> None:
        until(lambda: len(door.app.state.streams))
        door.end_streams()
        worker.append(task_id, 1, ["b"])
        worker.finish(task_id, [2])

    going_on = started(go_on)
    assert penstock("tail", task_id) == Ran(0, "ab\n", "")
    going_on.join()


class TestTasks:
    def test_ls_prints_a_line_a_task_over_all_parts(
        self, penstock: Run, worker: FakeWorker, valkey: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "MAX_SCANNED", 2)
        made = [submitted(penstock, "--metadata", f"n={number % 2}") for number in range(5)]
        now = int(valkey.time()[0]) * 1000
        valkey.zadd(keys.TASKS, {task_id: now + number for number, task_id in enumerate(made)})
        worker.serve(made[0], ["x", "y"])
        script.run(valkey, protocol.admit("waits", "n", now, {"model": "tiny", "tier": "flex", "n": 1}))
        valkey.zadd(keys.REQUESTS, {"waits": now + 9})
        first, *lines = penstock("tasks", "ls").out.splitlines()
        assert first.split()[:5] == ["waits", "queued", "tiny", "flex", "request"]
        assert [line.split()[0] for line in lines] == made[::-1]
        assert [line.split()[0] for line in penstock("tasks", "ls", "--kind", "task").out.splitlines()] == made[::-1]
        assert lines[-1].split()[1:5] == ["completed", "tiny", "default", "task"]
        assert lines[-1].endswith("  2")
        assert penstock("tasks", "ls", "--limit", "2", "--oldest-first").out.count("\n") == 2
        nothing = penstock("tasks", "ls", "--status", "failed")
        assert (nothing.status, nothing.out) == (0, "")
        assert nothing.err.startswith("There are no such tasks.")
        assert penstock("tasks", "ls", "--status", "failed", "--json").err == ""
        ran = penstock("tasks", "ls", "--metadata", "n=1", "--status", "queued", "--since", "3600", "--json")
        assert [json.loads(line)["id"] for line in ran.out.splitlines()] == [made[3], made[1]]

    def test_ls_at_a_gateway_of_an_earlier_release_has_its_tasks(self, run: Run, scripted: Scripted) -> None:
        task = {"id": "t", "status": "queued", "model": "tiny", "tier": "flex", "created_at": 0, "usage": None}
        error = {"message": "kind is unknown", "type": "invalid_request_error", "param": "kind", "code": "unknown"}
        scripted.answers = [
            send(400, json.dumps({"error": error}).encode()),
            send(200, json.dumps({"data": [task], "has_more": False}).encode()),
        ]
        ran = run("tasks", "ls", "--url", scripted.url)
        assert (ran.status, ran.out.split()) == (
            0,
            ["t", "queued", "tiny", "flex", "task", "1970-01-01T00:00:00Z", "-"],
        )
        assert "earlier release" in ran.err
        assert ["kind=" in path for path in scripted.paths] == [True, False]

    def test_retry_prints_the_new_id(self, penstock: Run, worker: FakeWorker, valkey: Redis) -> None:
        task_id = submitted(penstock)
        assert penstock("tasks", "retry", task_id).status == 2
        worker.serve(task_id)
        assert task_of(valkey, penstock("tasks", "retry", task_id).out.strip()) == task_of(valkey, task_id)

    def test_delete_prints_the_ids_that_are_gone(self, penstock: Run, valkey: Redis) -> None:
        first, second = submitted(penstock), submitted(penstock)
        ran = penstock("tasks", "delete", first, "nobody", second)
        assert (ran.status, ran.out) == (2, f"{first}\n{second}\n")
        assert "nobody is not deleted: There is no task nobody" in ran.err
        assert "1 of 3 tasks are not deleted" in ran.err
        assert not valkey.exists(keys.task(first), keys.task(second))
        third = submitted(penstock)
        said = json.loads(penstock("tasks", "delete", third, "--json").out)
        assert said == {"id": third, "object": "task.deleted", "deleted": True}

    def test_a_key_submits_once(self, penstock: Run) -> None:
        assert len({submitted(penstock, "--idempotency-key", "k") for _ in range(2)}) == 1
