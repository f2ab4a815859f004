"""A receiver of webhooks as a process, which answers as the URL's path says, and a webhooks process to call it.

/ok 204    /status/N N    /hang no answer    /close none, and the end    /half half a head, and the end
/flood 200 and 10 MB    /drip 200 and a byte now and then, for ever    /redirect 302 to /ok    /later 503, Retry-After
/noise no HTTP, and the end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.waiting import PATIENCE_S, pauses
from tests.warm import Forked


@dataclass(frozen=True, slots=True)
class Event:
    """What a receiver got. `at`: unix time (s)."""

    path: str
    headers: dict[str, str]
    body: str
    at: float
    sni: str | None = None

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class Process:
    """A module that runs as a forked process of its own, its output in a file."""

    def __init__(self, module: str, *args: str, **env: str) -> None:
        self.log = Path(tempfile.mkstemp(prefix="penstock-", suffix=".log")[1])
        self.process = Forked([sys.executable, "-m", module, *args], {**os.environ, **env}, self.log)

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
        """Wait for a true answer, and give it."""
        deadline, pause = time.monotonic() + seconds, pauses(0.01)
        while not (answer := condition()):
            alive = self.process.poll() is None
            assert alive, f"it exited with {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not within {seconds} s; it says:\n{self.log.read_text()[-4000:]}"
            time.sleep(next(pause))
        return answer

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = PATIENCE_S) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)
        self.log.unlink(missing_ok=True)


class Receiver(Process):
    """`tls`: files of a certificate and its key."""

    def __init__(self, *tls: str) -> None:
        super().__init__("tests.receiver", *tls)
        self.port = int(self.until(lambda: next(filter(str.isdecimal, self.log.read_text().split("\n")[:-1]), "")))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[Event]:
        lines = self.log.read_text().splitlines(keepends=True)
        return [Event(**json.loads(line)) for line in lines if line.startswith("{") and line.endswith("\n")]

    def event(self, path: str = "/ok") -> Event:
        """The first event at this path, once it is there."""
        found: Event = self.until(lambda: next((one for one in self.events if one.path == path), None))
        return found


async def answer(path: str, writer: asyncio.StreamWriter) -> None:
    """Answers as the path says. Returning without an answer closes the connection."""
    word, _, rest = path.lstrip("/").partition("/")
    if word == "hang":
        await asyncio.sleep(3600)
    elif word == "half":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
    elif word == "noise":
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
    elif word == "flood":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10485760\r\n\r\n")
        for _ in range(160):
            writer.write(b"x" * 65536)
            await writer.drain()
    elif word == "drip":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10485760\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.2)
    elif word != "close":
        more = {"redirect": "location: /ok\r\n", "later": f"retry-after: {rest}\r\n"}.get(word, "")
        status = {"ok": "204", "redirect": "302", "later": "503", "status": rest}[word]
        body = "" if status == "204" else f"it is {status}"
        length = "" if status == "204" else f"content-length: {len(body)}\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{more}{length}\r\n{body}".encode())
        await writer.drain()
        return
    with contextlib.suppress(OSError):
        await writer.drain()
    raise ConnectionError("the end of this connection")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = (await reader.readexactly(int(headers["content-length"]))).decode()
            path = head[0].split(" ")[1]
            tls = writer.get_extra_info("ssl_object")
            event = {"path": path, "headers": headers, "body": body, "at": time.time()}
            event["sni"] = None if tls is None else tls.context.asked
            print(json.dumps(event), flush=True)
            await answer(path, writer)
    writer.close()


async def main(*tls: str) -> None:
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)

        def note(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            context.asked = name  # type: ignore[attr-defined]

        context.sni_callback = note  # type: ignore[assignment]
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
