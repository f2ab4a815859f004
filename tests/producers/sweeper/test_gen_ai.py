"""The sweeper that leads sends GenAI metrics once, and waits for no collector."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers import AsyncClient
from producers.connection.script import arun, text
from producers.contract import keys
from producers.store.measurements import GEN_AI, count_ended, read_measurements
from producers.store.usage.ledger import fold
from producers.sweeper import gen_ai
from producers.sweeper.gen_ai import SOURCE, GenAiMetrics, MetricsExporter, metrics_exporter
from producers.sweeper.sweeper import SweeperSettings, lead
from producers.tracing.export import TracingError
from tests.collector import Collector
from tests.producers.store.test_measurements import row
from tests.waiting import auntil


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def metrics_to(
    aclient: AsyncClient, collector: Collector, monkeypatch: pytest.MonkeyPatch, path: str = ""
) -> GenAiMetrics:
    for name, value in collector.environment(path).items():
        monkeypatch.setenv(name, value)
    return GenAiMetrics(aclient, MetricsExporter())


async def test_tasks_that_ended_are_in_the_conventions_histograms(
    aclient: AsyncClient, valkey: Redis, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their names, units, attributes and boundaries; the next leader goes on with the same series."""
    row(valkey)
    row(valkey)
    row(valkey, tier="batch", status="failed", started="", first="", longest=0)
    await count_ended(aclient.store)
    with Collector() as collector:
        first, second = (metrics_to(aclient, collector, monkeypatch) for _ in range(2))
        assert [await leader.sweep() for leader in (first, second)] == [{}, {}]
        half = len(collector.points) // 2
        for leader in (first, second):
            leader.close()
        points, again = collector.points[:half], collector.points[half:]
    same = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "penstock"}
    same |= {"gen_ai.request.model": model, "gen_ai.response.model": model}
    flex, failed = same | {"penstock.tier": "flex"}, same | {"penstock.tier": "batch", "error.type": "failed"}
    assert [(point.name, point.attributes, point.count, point.sum) for point in points] == [
        ("gen_ai.server.time_to_first_token", flex, 2, 5.0),
        ("gen_ai.server.time_per_output_token", flex, 2, 4.0),
        ("gen_ai.server.request.duration", flex, 2, 13.0),
        ("gen_ai.server.request.duration", failed, 1, 6.5),
    ]
    bounds = {histogram.name: [*histogram.bounds] for histogram in GEN_AI}
    for point, later in zip(points, again, strict=True):
        assert (point.unit, point.temporality) == ("s", "AGGREGATION_TEMPORALITY_CUMULATIVE")
        assert point.bounds == bounds[point.name]
        assert sum(point.counts) == point.count
        assert not point.extremes, "nobody knows them"
        assert (later.since, later.counts, later.resource) == (point.since, point.counts, point.resource)
        assert point.since <= point.at <= later.at
    assert [point.counts.index(2) for point in points[:3]] == [12, 12, 10]
    assert points[0].resource["service.name"] == "penstock"
    assert "service.instance.id" not in points[0].resource


async def test_of_two_sweepers_the_one_that_leads_sends(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what ends after the first call. While the first lives the other sends nothing, and it goes on after it."""
    row(valkey)
    with Collector() as collector:
        for name, value in collector.environment().items():
            monkeypatch.setenv(name, value)
        exporters = [MetricsExporter(), MetricsExporter()]
        settings = [SweeperSettings(valkey_url, valkey_url, name, every=0.01) for name in "ab"]
        sweepers = [
            asyncio.create_task(lead(aclient, its, exporter=exporter))
            for its, exporter in zip(settings, exporters, strict=True)
        ]

        def sent(count: int) -> bool:
            return count in {point.count for point in collector.points}

        try:
            for count in (1, 2):
                await auntil(partial(sent, count))
                number = "ab".index(text(valkey.get(keys.SWEEPER)))
                sweepers[number].cancel()
                await asyncio.wait((sweepers[number],))
                row(valkey)
        finally:
            for sweeper in sweepers:
                sweeper.cancel()
            await asyncio.wait(sweepers)
        assert len({point.since for point in collector.points}) == 1
        assert len(collector.points) == len({(point.name, point.at) for point in collector.points})


async def test_sums_that_began_again_have_a_later_beginning(
    aclient: AsyncClient, valkey: Redis, model: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = metrics_to(aclient, collector, monkeypatch)
    for k in range(2):
        for _ in range(2 - k):
            row(valkey)
        await count_ended(aclient.store)
        await metrics.sweep()
        valkey.delete(keys.metrics(model))
        await asyncio.sleep(0.002)  # by the store's clock
    metrics.close()
    first, second = (point for point in collector.points if point.name == GEN_AI[0].name)
    assert (first.count, second.count) == (2, 1)
    assert first.since <= first.at < second.since <= second.at


async def test_a_model_that_comes_again_and_a_leader_that_stood_still_go_on_with_the_series(
    aclient: AsyncClient, valkey: Redis, model: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a collector would count once more what it has."""
    before = len(collector.points)
    metrics, slow = (metrics_to(aclient, collector, monkeypatch) for _ in range(2))

    async def end_one_and_send() -> None:
        row(valkey)
        await count_ended(aclient.store)
        await metrics.sweep()
        await asyncio.sleep(0.002)  # by the store's clock

    await end_one_and_send()
    card = valkey.hget(keys.MODELS, model)
    assert card is not None
    valkey.hdel(keys.MODELS, model)
    await metrics.sweep()
    valkey.hset(keys.MODELS, model, card)
    await end_one_and_send()

    async def read_and_stand_still(store: AsyncRedis) -> dict[str, dict[str, int]]:
        sums = await read_measurements(store)
        monkeypatch.undo()
        await asyncio.sleep(0.002)
        await end_one_and_send()
        return sums

    monkeypatch.setattr(gen_ai, "read_measurements", read_and_stand_still)
    await slow.sweep()
    await end_one_and_send()
    for each in (metrics, slow):
        each.close()
    points = [point for point in collector.points[before:] if point.name == GEN_AI[0].name]
    assert [point.count for point in points] == [1, 2, 3, 2, 4]
    assert len({point.since for point in points}) == 1
    assert points[3].at < points[2].at, "what is older says so"


async def test_a_collector_that_is_away_or_hangs_is_waited_for_by_nobody(
    aclient: AsyncClient, valkey: Redis, model: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it missed is in the next call."""
    row(valkey)
    await count_ended(aclient.store)
    away = metrics_to(aclient, collector, monkeypatch, "/status/400")
    assert await away.sweep() == {"metrics_unsent": 1}
    away.close()
    hanging = metrics_to(aclient, collector, monkeypatch, "/hang")
    sweep = asyncio.create_task(hanging.sweep())
    await auntil(lambda: hanging._sending is not None)
    sweep.cancel()
    await asyncio.wait((sweep,))
    assert await hanging.sweep() == {"metrics_unsent": 1}
    hanging.close()
    await arun(aclient.store, fold(-1000))
    row(valkey)
    await count_ended(aclient.store)
    before = len(collector.points)
    back = metrics_to(aclient, collector, monkeypatch)
    assert await back.sweep() == {}
    back.close()
    assert {point.count for point in collector.points[before:]} == {2}


async def test_without_tasks_nothing_is_sent_and_a_broken_mark_begins_anew(
    aclient: AsyncClient, valkey: Redis, model: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(collector.points)
    metrics = metrics_to(aclient, collector, monkeypatch)
    assert await metrics.sweep() == {}
    assert len(collector.points) == before
    valkey.set(keys.metrics_mark(SOURCE), f'{{"{model}": ["soon"]}}')
    row(valkey)
    await count_ended(aclient.store)
    assert await metrics.sweep() == {}
    metrics.close()
    assert all(point.since == point.at for point in collector.points[before:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OTEL_METRICS_EXPORTER", "prometheus", "OTEL_METRICS_EXPORTER is 'prometheus'"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc", "http/protobuf alone"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "OTEL_METRIC_EXPORT_INTERVAL is '0'"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta", "metrics are cumulative"),
    ],
)
def test_an_environment_that_cannot_be_followed_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    assert metrics_exporter() is None
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv(name, value)
    with pytest.raises(TracingError, match=message):
        metrics_exporter()
