"""What Celery's users know keeps working: results, links, groups, chords, chains, ETA, expiry, inspect."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.result import AsyncResult

from producers import AsyncClient
from producers.connection.script import run
from producers.contract import keys
from producers.store.protocol import cancel
from producers.sweeper.compact import compact
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.workers.rig import MODEL, Rig
from workers.pool.app import make_app
from workers.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
SEEDS = itertools.count(1000)


def generate(app: Celery, seed: int, max_tokens: int = 4, **options: Any) -> Any:
    """A signature of the task."""
    return app.signature(
        keys.TASK_NAME, kwargs={"prompt": [1, 2, 3], "seed": seed, "max_tokens": max_tokens}, **options
    )


def test_a_result_comes_back_through_the_result_backend(served: Rig, app: Celery) -> None:
    seed = next(SEEDS)
    result = generate(app, seed, 5).apply_async()
    value = result.get(timeout=PATIENCE_S)
    assert value["text"] == text_of(seed, 0, 5)
    assert value["status"] == "completed"
    assert value["id"] == result.id
    assert value["model"] == "stub"
    assert [choice["finish_reason"] for choice in value["choices"]] == ["length"]
    assert value["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 5}
    assert result.state == "SUCCESS"
    served.check([result.id])


def test_an_ignored_result_is_not_stored(served: Rig, app: Celery) -> None:
    result = generate(app, next(SEEDS)).apply_async(ignore_result=True)
    served.check([result.id])
    assert not served.redis.exists(f"celery-task-meta-{result.id}")


def test_an_invalid_task_fails_with_its_reason(served: Rig, app: Celery) -> None:
    result = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokenz": 4})
    with pytest.raises(Exception, match="max_tokenz"):
        result.get(timeout=PATIENCE_S)
    assert result.state == "FAILURE"
    served.until_settled([result.id])
    assert served.record(result.id)["status"] == "failed"
    assert "unknown_parameter" in served.record(result.id)["error"]
    assert served.entries(result.id)[-1]["error"]["param"] == "max_tokenz"


def test_inspect_shows_a_task_while_it_runs_and_no_longer(served: Rig, app: Celery) -> None:
    result = generate(app, next(SEEDS), 4000).apply_async()
    served.until(lambda: served.tokens(result.id) > 2)
    assert result.id in active(served, app)
    assert run(served.store, cancel(result.id)) == [1, "in_progress"]
    served.until_settled([result.id])
    served.until(lambda: result.id not in active(served, app))


def active(served: Rig, app: Celery) -> list[str]:
    """Ids of the active tasks of the one worker."""
    hostname = f"penstock@{served.workers[0].name}"
    answer = app.control.inspect(destination=[hostname], timeout=60).active()
    assert answer, "the worker does not answer"
    return [task["id"] for task in answer[hostname]]


def test_inspect_tells_the_pool(served: Rig, app: Celery) -> None:
    hostname = f"penstock@{served.workers[0].name}"
    stats = app.control.inspect(destination=[hostname], timeout=60).stats()
    assert stats[hostname]["pool"]["max-concurrency"] == 64


def test_inspect_shows_no_password_and_nothing_of_the_workers_state(served: Rig, app: Celery) -> None:
    """Flower shows the configuration on a page; who may look there need not be who may open the store."""
    hostname = f"penstock@{served.workers[0].name}"
    inspect = app.control.inspect(destination=[hostname], timeout=60)
    options = inspect.conf()[hostname]["broker_transport_options"]
    assert options["penstock_link"].startswith("penstock:queue:")
    assert len(inspect.report()[hostname]["ok"]) < 10_000
    for url in ("redis://:hush@h/0", "rediss://ann:hush@h:1/0", "unix://:hush@/valkey.sock?db=0"):
        own = make_app(WorkerSettings(broker=url, store=url, model="tiny"))
        assert "hush" not in f"{dict(own.conf)} {own.connection_for_read().info()}"  # `stats` has the latter


def test_a_link_gets_the_result(served: Rig, app: Celery) -> None:
    seed = next(SEEDS)
    linked = app.signature("app.text", kwargs={"prefix": "linked:"})
    linked.freeze("linked-1")
    generate(app, seed).apply_async(link=linked)
    assert AsyncResult("linked-1", app=app).get(timeout=PATIENCE_S) == "linked:" + text_of(seed, 0, 4)


def test_link_error_hears_of_a_failure(served: Rig, app: Celery) -> None:
    failed = app.signature("app.failed")
    result = app.send_task(keys.TASK_NAME, kwargs={"prompt": []}, link_error=failed)
    served.until(lambda: served.redis.lrange("seen:failed", 0, -1))
    assert served.redis.lrange("seen:failed", 0, -1) == [result.id]


def test_a_chord_calls_back_when_all_are_done(served: Rig, app: Celery) -> None:
    seeds = [next(SEEDS) for _ in range(5)]
    result = chord([generate(app, seed) for seed in seeds], app=app)(app.signature("app.texts"))
    assert result.get(timeout=PATIENCE_S) == [text_of(seed, 0, 4) for seed in seeds]


def test_a_chord_with_a_failure_fails(served: Rig, app: Celery) -> None:
    bad = app.signature(keys.TASK_NAME, kwargs={"prompt": [1], "temperature": -1.0})
    result = chord([generate(app, next(SEEDS)), bad], app=app)(app.signature("app.texts"))
    with pytest.raises(Exception, match="temperature"):
        result.get(timeout=PATIENCE_S)


def test_a_group_gives_results_in_order(served: Rig, app: Celery) -> None:
    seeds = [next(SEEDS) for _ in range(6)]
    result = group([generate(app, seed) for seed in seeds], app=app).apply_async()
    assert [value["text"] for value in result.get(timeout=PATIENCE_S)] == [text_of(seed, 0, 4) for seed in seeds]


def test_a_chain_goes_from_the_engine_to_ordinary_tasks(served: Rig, app: Celery) -> None:
    seed = next(SEEDS)
    result = chain(generate(app, seed), app.signature("app.text", kwargs={"prefix": ">"}), app=app).apply_async()
    assert result.get(timeout=PATIENCE_S) == ">" + text_of(seed, 0, 4)


def test_a_chain_gives_the_next_prompt_what_the_last_said(served: Rig, app: Celery) -> None:
    seed = next(SEEDS)
    following = app.signature(keys.TASK_NAME, kwargs={"max_tokens": 4, "seed": 1})
    result = chain(generate(app, seed), following, app=app).apply_async()
    assert result.get(timeout=PATIENCE_S)["text"] == text_of(1, 0, 4)
    assert prompt_of(served, result.id) == text_of(seed, 0, 4)
    after_text = chain(app.signature("app.text", args=({"text": "said"},)), following.clone(), app=app).apply_async()
    assert after_text.get(timeout=PATIENCE_S)["status"] == "completed"
    assert prompt_of(served, after_text.id) == "said"


def test_a_chord_gives_the_last_prompt_what_all_said(served: Rig, app: Celery) -> None:
    seeds = [next(SEEDS) for _ in range(3)]
    last = app.signature(keys.TASK_NAME, kwargs={"max_tokens": 4})
    result = chord([generate(app, seed) for seed in seeds], app=app)(last)
    assert result.get(timeout=PATIENCE_S)["status"] == "completed"
    assert prompt_of(served, result.id) == "\n\n".join(text_of(seed, 0, 4) for seed in seeds)


def test_the_examples_in_the_documentation_run(
    served: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, page = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/use/celery.md"))
    first, _of_a_kind, _on_sqs, second = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert first in readme, "the same example stands in both"
    monkeypatch.setenv("BROKER_URL", served.url)
    example = (first + second).replace("tiny", "stub")
    exec(compile(example, "docs/use/celery.md", "exec"), {})
    assert capsys.readouterr().out.split()


def prompt_of(served: Rig, task_id: str) -> Any:
    return json.loads(served.record(task_id)["task"])["prompt"]


def test_an_ordinary_task_runs_beside(served: Rig, app: Celery) -> None:
    assert app.send_task("app.add", (2, 3)).get(timeout=PATIENCE_S) == 5


def test_an_ordinary_task_may_retry(served: Rig, app: Celery) -> None:
    assert app.send_task("app.retry_once").get(timeout=PATIENCE_S) == "done at the second try"


def test_an_ordinary_task_that_rejects_its_message_is_taken_again(served: Rig, app: Celery) -> None:
    results = [app.send_task("app.reject_once") for _ in range(20)]
    assert {result.get(timeout=PATIENCE_S) for result in results} == {"taken the second time"}


def test_a_countdown_is_waited_out(served: Rig, app: Celery) -> None:
    seconds, micros = served.redis.time()
    later = generate(app, next(SEEDS)).apply_async(countdown=1.5)
    at_once = generate(app, next(SEEDS)).apply_async()
    served.check([later.id, at_once.id])
    waited = int(served.record(later.id)["started"]) - seconds * 1000 - micros // 1000
    assert waited >= 1400, "began before its time"


def test_an_expired_task_is_revoked_and_fails(served: Rig, app: Celery) -> None:
    result = generate(app, next(SEEDS)).apply_async(expires=-5.0)
    served.until_settled([result.id])
    assert served.record(result.id)["status"] == "failed"
    assert "expired" in served.record(result.id)["error"]
    assert result.state == "REVOKED"
    assert served.entries(result.id)[-1]["end"] == "failed"


def test_a_task_that_expires_while_it_runs_ends(served: Rig, app: Celery) -> None:
    for seconds in (1.5, 6.0, 24.0):  # a machine that is busy may not have begun with it in time
        result = generate(app, next(SEEDS), 4000).apply_async(expires=seconds)
        served.until_settled([result.id])
        if "started" in served.record(result.id):
            break
    assert served.record(result.id)["status"] == "incomplete"
    assert "expired" in served.record(result.id)["error"]
    told = result.get(timeout=PATIENCE_S)
    assert result.state == "SUCCESS"
    assert (told["status"], told["choices"][0]["finish_reason"]) == ("incomplete", "deadline")
    assert len(told["token_ids"]) == len(served.entries(result.id)) - 1 > 0


@pytest.mark.parametrize(
    ("priority", "tier"),
    [(None, "default"), (0, "default"), (3, "priority"), (6, "flex"), (9, "batch"), (5, "priority")],
)
def test_a_stock_sender_s_priority_chooses_the_tier(served: Rig, app: Celery, priority: int | None, tier: str) -> None:
    result = generate(app, next(SEEDS)).apply_async(priority=priority)
    served.check([result.id])
    assert served.record(result.id)["tier"] == tier


def test_a_task_that_is_sent_again_gives_its_result_again_and_the_engine_does_not_run(served: Rig, app: Celery) -> None:
    """Also where its stream was compacted since, and where it had failed. Links are not sent again."""
    seed, heard = next(SEEDS), app.signature("app.failed")
    first = generate(app, seed).apply_async()
    bad = app.send_task(keys.TASK_NAME, kwargs={"prompt": []}, link_error=heard)
    value = first.get(timeout=PATIENCE_S)
    served.check([first.id])
    served.until_settled([bad.id])
    served.until(lambda: served.redis.lrange("seen:failed", 0, -1).count(bad.id) == 1)
    for compacted in (False, True):
        if compacted:
            asyncio.run(compact_now(served))
            assert not served.redis.exists(keys.stream(first.id))
        for result in (first, bad):
            result.forget()
            assert not served.redis.exists(f"celery-task-meta-{result.id}")
        again = generate(app, seed, 400).apply_async(task_id=first.id)
        failed = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1]}, task_id=bad.id, link_error=heard)
        assert again.get(timeout=PATIENCE_S) == value
        with pytest.raises(Exception, match="prompt is empty"):
            failed.get(timeout=PATIENCE_S)
    assert served.record(first.id)["claims"] == "1"
    served.until(lambda: all(lease["tasks"] == 0 for lease in served.leases()))
    served.check_nothing_left()
    assert served.redis.lrange("seen:failed", 0, -1).count(bad.id) == 1


async def compact_now(served: Rig) -> None:
    async with AsyncClient(served.url, served.store_url) as client:
        await compact(client, 0)


def test_a_task_that_is_sent_again_and_wants_no_result_gets_none(served: Rig, app: Celery) -> None:
    result = generate(app, next(SEEDS)).apply_async(ignore_result=True)
    served.check([result.id])
    generate(app, next(SEEDS)).apply_async(task_id=result.id, ignore_result=True)
    served.until(lambda: served.waiting(MODEL) == 0)
    served.until(lambda: all(lease["tasks"] == 0 for lease in served.leases()))
    served.check_nothing_left()
    assert not served.redis.exists(f"celery-task-meta-{result.id}")


def test_a_client_s_task_does_not_give_its_output_to_whoever_knows_its_id(served: Rig, app: Celery) -> None:
    (ours,) = served.fill(1)
    served.check([ours])
    result = generate(app, next(SEEDS)).apply_async(task_id=ours)
    with pytest.raises(Exception, match="submitted in another way"):
        result.get(timeout=PATIENCE_S)


def test_once_its_record_has_expired_a_task_that_is_sent_again_runs_anew(served: Rig, app: Celery) -> None:
    seed = next(SEEDS)
    result = generate(app, seed).apply_async()
    result.get(timeout=PATIENCE_S)
    served.until_settled([result.id])
    result.forget()
    served.redis.delete(keys.task(result.id), keys.stream(result.id))
    again = generate(app, seed + 100).apply_async(task_id=result.id)
    assert again.get(timeout=PATIENCE_S)["text"] == text_of(seed + 100, 0, 4)


def test_messages_of_the_model_s_queue_and_the_pool_s_are_both_taken(served: Rig, app: Celery) -> None:
    plain = generate(app, next(SEEDS)).apply_async(queue=MODEL)
    (ours,) = served.fill(1)
    served.check([plain.id, ours])


def test_nothing_is_left_behind(served: Rig, app: Celery) -> None:
    served.until(lambda: all(lease["tasks"] == 0 for lease in served.leases()))
    served.check_nothing_left()
    assert served.dead() == []
