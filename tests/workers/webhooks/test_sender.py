from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import pytest

from producers.connection.addresses import networks
from tests.receiver import Receiver
from workers.webhooks.deliverer import SCHEDULE
from workers.webhooks.sender import MAX_RETRY_AFTER_S, Sender, next_delay, retry_after


class Names:
    """A resolver whose name has other addresses each time."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)

    async def resolve(self, host: str) -> list[Any]:
        return [ip_address(one) for one in self._answers.pop(0)]

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    made = Sender(networks(["127.0.0.0/8"]), 10.0)
    yield made
    await made.close()


async def test_a_name_that_moves_to_a_private_address_is_not_called_over_a_connection_that_is_open(
    sender: Sender,
) -> None:
    await sender._resolver.aclose()
    sender._resolver = Names(["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["127.0.0.2", "127.0.0.1"])  # type: ignore[assignment]
    with Receiver() as receiver:
        url = f"http://hook.test:{receiver.port}/ok"
        first, moved, both, second = [await sender.send(url, {"webhook-id": "x"}, "{}") for _ in range(4)]
        hosts = [event.headers["host"] for event in receiver.events]
    assert first.delivered
    for refused in (moved, both):
        assert "10.0.0.1" in refused.attempt.error
    assert second.delivered  # nobody listens at the first of two addresses
    assert hosts == [f"hook.test:{receiver.port}"] * 2


async def test_an_error_shows_nothing_of_the_urls_path_which_may_be_a_secret(sender: Sender) -> None:
    with Receiver() as receiver:
        outcome = await sender.send(f"{receiver.url}/noise/T0KEN?key=T0KEN", {}, "{}")
    assert "not HTTP" in outcome.attempt.error
    assert "T0KEN" not in outcome.attempt.error


def test_retries_follow_the_schedule_and_a_receivers_wish_delays_them() -> None:
    assert len(SCHEDULE) == 10
    assert 75 < sum(SCHEDULE) / 3600 < 77
    for tries, wait in enumerate(SCHEDULE[1:], 1):
        delay = next_delay(SCHEDULE, tries, None)
        assert delay is not None
        assert wait <= delay <= 1.2 * wait
    assert next_delay(SCHEDULE, 10, 5.0) is None
    assert 60 <= (next_delay(SCHEDULE, 1, 60.0) or 0) <= 72
    assert (next_delay(SCHEDULE, 4, 60.0) or 0) >= SCHEDULE[4]
    assert (next_delay(SCHEDULE, 1, 1e9) or 0) <= 1.2 * MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *((text, None) for text in (None, "soon", "", "-5", "Wed, 21 Oct 99999999999999999999 07:28:00 GMT")),
        ("12", 12.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds
