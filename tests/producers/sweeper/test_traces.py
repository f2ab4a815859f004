"""The sweeper sends tasks' traces from the ledger, and holds nothing while the collector is away."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import text
from producers.contract import keys
from producers.sweeper import traces
from producers.sweeper.traces import BATCH_LINES, SOURCE, TaskTraces
from producers.tracing.export import Tracer
from tests.collector import Collector
from tests.waiting import auntil

MARK = keys.metrics_mark(SOURCE)


def end_task(valkey: Redis, task_id: str, entry: str = "*") -> None:
    """A task that has ended, as far as traces read it."""
    valkey.hset(keys.task(task_id), mapping={"status": "completed", "model": "tiny", "created": 5, "finished": 9})
    valkey.xadd(keys.LEDGER, {"id": task_id, "status": "completed"}, id=entry)


def traces_to(
    aclient: AsyncClient, collector: Collector, monkeypatch: pytest.MonkeyPatch, path: str = ""
) -> TaskTraces:
    for name, value in collector.environment(path).items():
        monkeypatch.setenv(name, value)
    return TaskTraces(aclient, Tracer("sweeper"), after_ms=0)


async def test_while_the_collector_is_away_tasks_wait_in_the_ledger(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too old by then, or was deleted, is passed over."""
    end_task(valkey, "too-old", "5-0")
    valkey.set(MARK, "0-0")
    end_task(valkey, "t1")
    end_task(valkey, "deleted")
    valkey.delete(keys.task("deleted"))
    end_task(valkey, "t2")
    await asyncio.sleep(0.002)  # they ended before this millisecond
    with Collector() as collector:
        away = traces_to(aclient, collector, monkeypatch, "/status/400")
        assert await away.sweep() == {"traces_sent": 0, "traces_dropped": 0}
        assert valkey.get(MARK) == b"0-0"
        away.close()
        back = traces_to(aclient, collector, monkeypatch)
        assert await back.sweep() == {"traces_sent": 2, "traces_dropped": 1}
        assert await back.sweep() == {"traces_sent": 0, "traces_dropped": 0}
        back.close()
        assert [span.attributes["penstock.task.id"] for span in collector.spans if span.parent_id == ""] == ["t1", "t2"]


async def test_the_first_sweeper_takes_what_ended_before_it_led(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a system that has just started; what ended before that, while traces were off, is left."""
    seconds, _ = valkey.time()
    end_task(valkey, "before", f"{1000 * seconds - 2 * traces.FIRST_MS}-0")
    end_task(valkey, "just", f"{1000 * seconds - traces.FIRST_MS // 2}-0")
    with Collector() as collector:
        sweeps = traces_to(aclient, collector, monkeypatch)
        assert await sweeps.sweep() == {"traces_sent": 1, "traces_dropped": 0}
        sweeps.close()
        assert {span.attributes.get("penstock.task.id", "just") for span in collector.spans} == {"just"}


async def test_a_task_in_chunks_has_a_span_of_its_own_once_it_has_ended(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks have rows, and it has none."""
    valkey.set(MARK, "0-0")
    for number in range(3):
        end_task(valkey, f"p.{number}")
        valkey.hset(keys.task(f"p.{number}"), mapping={"parent": "p", "chunk": number})
    end_task(valkey, "other.0")
    valkey.hset(keys.task("other.0"), "parent", "runs-on")
    valkey.hset(keys.task("runs-on"), mapping={"status": "in_progress", "created": 1, "chunks": 2})
    whole = {"status": "completed", "model": "tiny", "created": 1000, "queued": 1001, "finished": 5000, "chunks": 3}
    valkey.hset(keys.task("p"), mapping=whole)
    await asyncio.sleep(0.002)
    with Collector() as collector:
        sweeps = traces_to(aclient, collector, monkeypatch)
        assert await sweeps.sweep() == {"traces_sent": 5, "traces_dropped": 0}
        sweeps.close()
        (span,) = (span for span in collector.spans if span.attributes.get("penstock.task.id") == "p")
        assert (span.name, span.attributes["penstock.chunks"]) == ("generate tiny", 3)
        assert [child.name for child in collector.spans if child.parent_id == span.span_id] == ["submit"]


async def test_a_sweep_returns_at_once_while_a_call_has_no_answer(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.set(MARK, "0-0")
    end_task(valkey, "t1")
    await asyncio.sleep(0.002)
    with Collector() as collector:
        hanging = traces_to(aclient, collector, monkeypatch, "/hang")
        first = asyncio.create_task(hanging.sweep())
        await auntil(lambda: hanging._sending is not None)
        first.cancel()
        await asyncio.wait((first,))
        assert await hanging.sweep() == {"traces_sent": 0, "traces_dropped": 0}
        hanging.close()
    assert valkey.get(MARK) == b"0-0"


async def test_a_slow_collector_fails_no_sweep_and_gets_each_part_once(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.set(MARK, "0-0")
    for task_id in ("t1", "t2", "t3"):
        end_task(valkey, task_id)
    await asyncio.sleep(0.002)
    monkeypatch.setattr(traces, "RECORDS", 1)
    with Collector() as collector:
        sweeps = traces_to(aclient, collector, monkeypatch)
        export, takes = sweeps._tracer.export, iter((True, False, True, True))
        monkeypatch.setattr(sweeps._tracer, "export", lambda spans: next(takes) and export(spans))
        assert await sweeps.sweep() == {"traces_sent": 1, "traces_dropped": 0}
        assert text(valkey.get(MARK)) == text(valkey.xrange(keys.LEDGER)[0][0])
        monkeypatch.setattr(traces, "SWEEP_S", -1.0)  # a part in each sweep
        assert [(await sweeps.sweep())["traces_sent"] for _ in range(3)] == [1, 1, 0]
        sweeps.close()
        ids = [span.attributes["penstock.task.id"] for span in collector.spans if span.parent_id == ""]
        assert ids == ["t1", "t2", "t3"]
        end_task(valkey, "t4")
        await asyncio.sleep(0.002)
        monkeypatch.setattr(traces, "ANSWER_S", 0.0)
        hanging = traces_to(aclient, collector, monkeypatch, "/hang")
        assert await hanging.sweep() == {"traces_sent": 0, "traces_dropped": 0}
        hanging.close()


async def test_tasks_that_ended_before_traces_were_turned_on_are_not_sent(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_task(valkey, "before")
    await asyncio.sleep(0.002)
    with Collector() as collector:
        sweeps = traces_to(aclient, collector, monkeypatch)
        await sweeps.sweep()
        end_task(valkey, "after")
        await asyncio.sleep(0.002)
        assert await sweeps.sweep() == {"traces_sent": 1, "traces_dropped": 0}
        sweeps.close()


async def test_of_a_batch_the_first_lines_are_sent(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them would be one trace, which nobody could show."""
    valkey.set(MARK, "0-0")
    for line in (0, BATCH_LINES - 1, BATCH_LINES, 10**15):
        end_task(valkey, f"line-{line}")
        valkey.hset(keys.task(f"line-{line}"), mapping={"batch": "b", "line": line})
    await asyncio.sleep(0.002)
    with Collector() as collector:
        sweeps = traces_to(aclient, collector, monkeypatch)
        assert await sweeps.sweep() == {"traces_sent": 2, "traces_dropped": 0}
        sweeps.close()
        lines = {span.attributes["penstock.line"] for span in collector.spans if span.parent_id == ""}
    assert lines == {"0", str(BATCH_LINES - 1)}
