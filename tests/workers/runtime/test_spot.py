"""A spot notice drains the worker in the time that is left. The metadata service is a real one, but for its address."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from tests.waiting import PATIENCE_S, until
from tests.workers.http_server import Handler, HttpServer
from tests.workers.rig import Rig
from workers.runtime import aws
from workers.runtime.aws import SpotNotice, parse_notice


class Metadata(HttpServer):
    """As an instance has it (IMDSv2): nothing without a token, which is good for a while. `notice`, and `state`, the
    target of its lifecycle in an Auto Scaling group: None is 404."""

    def __init__(self) -> None:
        self.notice: bytes | None = None
        self.state: bytes | None = None
        self.first: list[bytes] = []  # what it answers before it is up, from the last on
        self.good: set[str] = set()
        self.asked: list[str] = []
        metadata = self

        class Imds(Handler):
            def do_PUT(self) -> None:
                metadata.asked.append(f"PUT {self.path}")
                seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
                if metadata.first:
                    self.wfile.write(metadata.first.pop())
                    self.close_connection = True
                    return None
                if self.path != "/latest/api/token" or not 1 <= int(seconds or 0) <= 21_600:
                    return self.tell(400, b"")
                token = f"token{len(metadata.asked)}"
                metadata.good.add(token)
                return self.tell(200, token.encode())

            def do_GET(self) -> None:
                metadata.asked.append(f"GET {self.path}")
                if self.headers.get("X-aws-ec2-metadata-token") not in metadata.good:
                    return self.tell(401, b"")
                said = {
                    "/latest/meta-data/spot/instance-action": metadata.notice,
                    "/latest/meta-data/autoscaling/target-lifecycle-state": metadata.state,
                }.get(self.path)
                return self.tell(404, b"Not Found") if said is None else self.tell(200, said)

        super().__init__(Imds)

    def announce(self, seconds: float) -> None:
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        self.notice = json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}).encode()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


@dataclass
class Watched:
    """A thread that asks often, and what it found. `end` ends it, if it did not find anything."""

    thread: SpotNotice
    found: list[tuple[float, str]]

    def end(self) -> None:
        self.thread.stop()
        self.thread.join(PATIENCE_S)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Watched]:
    monkeypatch.setattr(aws, "NOTICE_PERIOD_S", 0.01)
    monkeypatch.setattr(aws, "METADATA_ANSWER_S", 60.0)

    def begin(url: str) -> Watched:
        found: list[tuple[float, str]] = []
        made = Watched(SpotNotice(lambda *told: found.append(told), url), found)
        made.thread.start()
        return made

    return begin


Watch = Callable[[str], Watched]


def test_it_is_seen_once_also_after_the_token_went_bad(metadata: Metadata, watch: Watch) -> None:
    watched = watch(metadata.url + "/")
    until(lambda: len(metadata.asked) > 3)
    assert metadata.asked.count("PUT /latest/api/token") == 1, "a token is used again"
    metadata.good.clear()
    metadata.announce(3600)
    watched.thread.join(PATIENCE_S)
    assert metadata.asked.count("PUT /latest/api/token") == 2
    ((left, why),) = watched.found
    assert 3500 < left <= 3595
    assert "terminate" in why


def test_an_instance_that_its_group_ends_has_all_the_drain_time(metadata: Metadata, watch: Watch) -> None:
    metadata.state = b"InService"
    watched = watch(metadata.url)
    until(lambda: len(metadata.asked) > 5)
    assert not watched.found
    metadata.state = b"Terminated"
    watched.thread.join(PATIENCE_S)
    assert watched.found == [(math.inf, "The Auto Scaling group ends this instance")]


def test_what_answers_before_the_metadata_do_is_not_believed_for_ever(metadata: Metadata, watch: Watch) -> None:
    page = b"<html>\r\n</html>"
    metadata.first = [b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page), b"no HTTP\r\n\r\n"]
    metadata.announce(120)
    watched = watch(metadata.url)
    watched.thread.join(PATIENCE_S)
    assert len(watched.found) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:port"])
def test_an_endpoint_that_cannot_be_asked_is_told_of_once(
    watch: Watch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    def told() -> int:
        return sum("its end would not be seen" in record.getMessage() for record in list(caplog.records))

    with caplog.at_level(logging.WARNING):
        watched = watch(url)
        until(told)
        time.sleep(0.3)
    watched.end()
    assert told() == 1


@pytest.mark.parametrize(
    ("notice", "left"),
    [
        (b'{"action": "stop", "time": "2026-01-01T00:02:00Z"}', 115.0),
        (b'{"action": "terminate", "time": "2025-12-31T00:00:00Z"}', 0.0),
        (b'{"action": "terminate", "time": "soon"}', 60.0),
        (b'{"action": "terminate", "time": "2026-01-01T00:02:00"}', 60.0),
        (b'{"action": "terminate"}', 60.0),
        (b"[]", 60.0),
        (b"\xff<html>", 60.0),
    ],
)
def test_what_a_notice_leaves(notice: bytes, left: float) -> None:
    assert parse_notice(notice, datetime(2026, 1, 1, tzinfo=UTC))[0] == left


@pytest.mark.slow
def test_a_worker_drains_in_the_time_that_is_left(metadata: Metadata, rig: Rig) -> None:
    """It is to go in 6 s, of which draining gets one; its own drain time is longer."""
    worker = rig.worker(
        spot_notice="aws",
        spot_endpoint=metadata.url,
        drain=600.0,
        STUB_STEP_S=0.01,
        WORKER_PLUGINS="tests.workers.plugins:looks_often_for_notices",
    )
    (task_id,) = rig.begun(1, max_tokens=4000)
    metadata.announce(7)
    assert worker.process.wait(PATIENCE_S) == 0
    assert "A spot notice came: terminate" in worker.log.read_text()
    assert (rig.status(task_id), rig.record(task_id)["deaths"]) == ("queued", "0")


def test_without_it_nobody_asks(metadata: Metadata, rig: Rig) -> None:
    worker = rig.worker(spot_endpoint=metadata.url, WORKER_PLUGINS="tests.workers.plugins:looks_often_for_notices")
    assert worker.stop() == 0
    assert metadata.asked == []
