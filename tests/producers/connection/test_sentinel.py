"""Sentinels that do not answer are not asked by every connection that is tried."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError

from producers.connection import sentinel
from producers.connection.sentinel import Sentinels


class Mute:
    """Takes connections, counts them, and ends them without a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.asked = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if connection.recv(1 << 16) == b"over":
                    return
                self.asked += 1

    def close(self) -> None:
        with socket.create_connection(self.address) as connection:
            connection.sendall(b"over")
        self._thread.join()
        self._listener.close()


@pytest.fixture
def mute() -> Iterator[Mute]:
    mute = Mute()
    yield mute
    mute.close()


async def test_they_are_asked_once_in_a_while(mute: Mute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "RETRY_S", 3600.0)
    monkeypatch.setattr(sentinel, "PATIENCE_S", 60.0)
    asked = Sentinels("main", [mute.address])
    for _ in range(5):
        with pytest.raises(ConnectionError, match="no Sentinel says where the primary 'main' is"):
            asked.primary()
        with pytest.raises(ConnectionError, match="no Sentinel says"):
            await asked.aprimary()
    assert mute.asked == 1
    asked.current = ("127.0.0.1", 1)
    assert asked.primary() == ("127.0.0.1", 1), "it may well serve"
    monkeypatch.setattr(sentinel, "RETRY_S", 0.0)
    again = Sentinels("main", [mute.address])
    for _ in range(2):
        with pytest.raises(ConnectionError):
            again.primary()
    assert mute.asked == 3
