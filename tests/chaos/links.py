"""TCP proxies between each process and each server, which can be made bad.

    refuse   connections break, and new ones are refused
    silence  nothing passes, either way; nobody is told. What was held back passes when it is over, as TCP would do
    deaf     the process hears nothing: its requests pass, the answers are held back
    mute     the server hears nothing
    delay    every piece passes so much later
    cut      the next answer breaks off after some bytes, and its connection with it
    forget   nothing passes any more on the connections that are open, and nobody is ever told; new ones are served

All are served by one thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any

from tests.processes import free_port
from tests.waiting import PATIENCE_S


class Link:
    """One of them. `port` is where the process connects; `server` where it leads."""

    def __init__(self, name: str, server: int) -> None:
        self.name, self.server = name, server
        self.port = free_port()
        self.mode = "ok"
        self.amount = 0.0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._forgotten = 0
        """How often all connections were."""
        self._listener: asyncio.Server | None = None

    async def listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 16)

    async def make(self, mode: str, amount: float) -> None:
        """`ok` heals it."""
        if mode == "forget":
            self._forgotten += 1
            mode = "ok"
        self.mode, self.amount = mode, amount
        if mode in ("ok", "delay", "cut"):
            self._passes.set()
        else:
            self._passes.clear()
        if mode == "refuse":
            await self._shut()
        elif self._listener is None:
            await self.listen()

    async def _shut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._open):
            _reset(writer)

    async def close(self) -> None:
        self._passes.set()
        await self._shut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server, limit=1 << 16)
        except OSError:
            _reset(writer)
            return
        both = (writer, far_writer)
        self._open.update(both)
        ways = (self._relay(reader, far_writer, answers=False), self._relay(far_reader, writer, answers=True))
        tasks = [asyncio.ensure_future(way) for way in ways]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        finally:
            for task in tasks:
                task.cancel()
            self._tasks.difference_update(tasks)
            self._open.difference_update(both)
            for one in both:
                _reset(one)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        loop, began = asyncio.get_running_loop(), self._forgotten
        due = 0.0  # when all that was delayed is on its way
        try:
            while data := await reader.read(1 << 16):
                while not self._passes.is_set() and self.mode != ("mute" if answers else "deaf"):
                    await self._passes.wait()
                if self._forgotten != began:
                    continue
                if self.mode == "delay":
                    due = max(due + 1e-6, loop.time() + self.amount)
                    loop.call_at(due, writer.write, data)
                    continue
                await asyncio.sleep(due - loop.time())
                if self.mode == "cut" and answers:
                    self.mode = "ok"
                    writer.write(data[: int(self.amount)])
                    await writer.drain()
                    return
                writer.write(data)
                await writer.drain()
            await asyncio.sleep(due - loop.time())
            if self._forgotten != began and answers:
                await loop.create_future()  # the server ended it, of which nobody hears
        except OSError:
            pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """As a firewall or a dead machine would end it: what is under way is lost."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Links:
    """All links of a stage, and the thread that serves them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self.by_name: dict[str, Link] = {}

    def add(self, name: str, server: int) -> int:
        """The port to connect to."""
        link = Link(name, server)
        self._do(link.listen())
        self.by_name[name] = link
        return link.port

    def make(self, name: str, mode: str, amount: float = 0.0) -> None:
        self._do(self.by_name[name].make(mode, amount))

    def close(self) -> None:
        for link in self.by_name.values():
            self._do(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)
