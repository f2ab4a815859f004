"""A proxy before moto's server that puts in what moto lacks: AWS's faults, by script or by chance, from a seed.

    boto3 ──▶ proxy: draws this request's faults ──▶ moto ──▶ proxy: may change, repeat or cut the answer ──▶ boto3

Writes pass one at a time: moto's own threads may lose a message that is sent while another is deleted.

| kind | what happens | of |
| --- | --- | --- |
| `throttle` `error` `expired` `denied` `skewed` `over` | refused, with AWS's own code (`REFUSALS`) | any action |
| `reset` | the connection is reset, nothing was done | any action |
| `lost` | it was done; the connection is reset before the answer | any action |
| `slow` | it waits for `seconds` first | any action |
| `hidden` | the answer is empty, though messages wait | ReceiveMessage |
| `twice` | a received message is visible at once: the next receive has it too, by another receipt | ReceiveMessage |
| `delayed` | what was sent, or handed back, is visible `seconds` (whole) later | SendMessage, ChangeMessageVisibility |
| `kept` | the answer is good, but the message is not deleted, and visible again | DeleteMessage |
| `stale` | the answer is good, but a receipt that is not the message's latest deletes nothing | DeleteMessage |
| `partial` | an entry of a batch fails with InternalError | all batches |
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.aws import Aws

#: Status, code and text of refusals. S3 says SlowDown for `throttle`.
REFUSALS: Final = {
    "throttle": (400, "RequestThrottled", "Rate exceeded"),
    "error": (500, "InternalError", "We encountered an internal error. Please try again."),
    "expired": (403, "ExpiredToken", "The security token included in the request is expired"),
    "denied": (403, "AccessDenied", "User is not authorized to perform this action"),
    "skewed": (
        403,
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large",
    ),
    "over": (403, "OverLimit", "Too many messages are in flight"),
}
_KINDS: Final = {*REFUSALS, "reset", "lost", "slow", "hidden", "twice", "delayed", "kept", "stale", "partial"}
#: Headers of one connection, which the proxy makes itself.
_HOP: Final = {"connection", "transfer-encoding", "content-length", "keep-alive", "expect", "date", "server"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come. `action`: as `ReceiveMessage` (a batch counts as its action), for S3 a method as `PUT`; any if
    empty. It comes with the `chance`, `times` often at most; for kinds that concern messages, to each of them.
    `path`: a refusal comes only to a request whose path and query have this in them."""

    kind: str
    action: str = ""
    chance: float = 1.0
    times: float = float("inf")
    seconds: float = 0.0
    path: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"{self.kind!r} is no kind of fault; there are {', '.join(sorted(_KINDS))}")


@dataclass(slots=True)
class Faults:
    """The faults in force; any thread may change them. `asked`: requests by action (`ReceiveMessage`,
    `DeleteMessageBatch`); `sent`: bytes of their bodies, by action; `done`: faults that came, by kind."""

    seed: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    _luck: random.Random = field(init=False)
    _left: list[list[Any]] = field(init=False, default_factory=list)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._luck = random.Random(self.seed)

    def put(self, *faults: Fault) -> None:
        with self._lock:
            self._left += [[fault, fault.times] for fault in faults]

    def calm(self) -> None:
        """No faults from now on."""
        with self._lock:
            self._left.clear()

    def draw(self, kind: str, action: str, path: str = "") -> Fault | None:
        """The fault of this kind that comes now, if one does."""
        with self._lock:
            for one in self._left:
                fault, left = one
                fits = fault.kind == kind and fault.action in ("", action.removesuffix("Batch")) and fault.path in path
                if fits and left and self._luck.random() < fault.chance:
                    one[1] -= 1
                    self.done[kind] += 1
                    return fault
        return None


@dataclass(slots=True)
class Call:
    """A request, and the answer to it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def action(self) -> str:
        """`ReceiveMessage`; the method, of what is REST."""
        target = self.headers.get("X-Amz-Target", "")
        form = (
            parse_qs(self.body.decode()) if self.headers.get("Content-Type", "").startswith("application/x-www") else {}
        )
        return target.partition(".")[2] or "".join(form.get("Action", [])) or self.method


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, said: dict[str, Any], status: int = 200) -> Answer:
        return cls(status, {"Content-Type": "application/x-amz-json-1.0"}, json.dumps(said).encode())


def refused(call: Call, kind: str) -> Answer:
    """A refusal in the protocol that the call speaks."""
    status, code, text = REFUSALS[kind]
    if "X-Amz-Target" in call.headers:
        return Answer.of({"__type": f"com.amazonaws.sqs#{code}", "message": text}, status)
    error = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>"
    if call.action != call.method:  # a query, such as SNS's
        return Answer(status, {"Content-Type": "text/xml"}, f"<ErrorResponse>{error}</ErrorResponse>".encode())
    if kind == "throttle":
        status, error = 503, error.replace(code, "SlowDown")
    return Answer(status, {"Content-Type": "application/xml"}, error.encode())


@dataclass(slots=True)
class Proxy:
    """Answers calls: its faults first, then by moto at `upstream`."""

    upstream: str
    faults: Faults
    _one: threading.Lock = field(init=False, default_factory=threading.Lock)
    _latest: dict[str, str] = field(init=False, default_factory=dict)
    """Receipt -> message id, and message id -> its latest receipt."""

    def answer(self, call: Call) -> Answer | None:
        """None: the connection is to be reset."""
        action, draw = call.action, self.faults.draw
        self.faults.asked[action] += 1
        self.faults.sent[action] += len(call.body)
        if slow := draw("slow", action):
            time.sleep(slow.seconds)
        if draw("reset", action):
            return None
        if kind := next((kind for kind in REFUSALS if draw(kind, action, call.path)), None):
            return refused(call, kind)
        lost = draw("lost", action)
        answer = self._received(call) if action == "ReceiveMessage" else self._written(call, action)
        return None if lost else answer

    def _received(self, call: Call) -> Answer:
        if self.faults.draw("hidden", "ReceiveMessage"):
            return Answer.of({})
        answer = self.ask(call)
        asked = json.loads(call.body)
        for message in json.loads(answer.body or b"{}").get("Messages", ()) if answer.status == 200 else ():
            receipt, mid = message["ReceiptHandle"], message["MessageId"]
            self._latest |= {receipt: mid, mid: receipt}
            if self.faults.draw("twice", "ReceiveMessage"):
                self._show(call, {"QueueUrl": asked["QueueUrl"], "ReceiptHandle": receipt})
        return answer

    def _written(self, call: Call, action: str) -> Answer:
        """The call less the entries that a fault takes; their answers are added to moto's."""
        with self._one:
            if not call.headers.get("X-Amz-Target", "").startswith("AmazonSQS") or "Message" not in action:
                return self.ask(call)
            said = json.loads(call.body)
            batch = said.get("Entries") if action.endswith("Batch") else [said]
            good, failed, left = [], [], []
            for one in batch:
                outcome = self._entry(call, action, said, one)
                {"good": good, "failed": failed, "": left}[outcome].append(one)
            if not action.endswith("Batch"):
                return self.ask(_with(call, left[0])) if left else Answer.of({})
            answer = self.ask(_with(call, {**said, "Entries": left})) if left else Answer.of({})
            if answer.status != 200 or not (good or failed):
                return answer
            told = json.loads(answer.body)
            told["Successful"] = told.get("Successful", []) + [{"Id": one["Id"]} for one in good]
            told["Failed"] = told.get("Failed", []) + [
                {"Id": one["Id"], "SenderFault": False, "Code": "InternalError", "Message": "try again"}
                for one in failed
            ]
            return Answer.of(told)

    def _entry(self, call: Call, action: str, said: dict[str, Any], one: dict[str, Any]) -> str:
        """What becomes of one entry: `good` or `failed` without moto; else it is left, perhaps changed."""
        draw, receipt = self.faults.draw, one.get("ReceiptHandle", "")
        if action.endswith("Batch") and draw("partial", action):
            return "failed"
        if action.startswith("DeleteMessage"):
            if draw("kept", action):
                self._show(call, {"QueueUrl": said["QueueUrl"], "ReceiptHandle": receipt})
                return "good"
            latest = self._latest.get(self._latest.get(receipt, ""), receipt)
            return "good" if latest != receipt and draw("stale", action) else ""
        sends = action.startswith("SendMessage")
        if (sends or one.get("VisibilityTimeout") == 0) and (late := draw("delayed", action)):
            name = "DelaySeconds" if sends else "VisibilityTimeout"
            one[name] = one.get(name, 0) + int(late.seconds)
        return ""

    def _show(self, call: Call, message: dict[str, Any]) -> None:
        """Make a message visible, whoever has it."""
        headers = {**call.headers, "X-Amz-Target": "AmazonSQS.ChangeMessageVisibility"}
        body = json.dumps({**message, "VisibilityTimeout": 0}).encode()
        self.ask(Call("POST", call.path, headers, body))

    def ask(self, call: Call) -> Answer:
        """moto's answer."""
        to = urlsplit(self.upstream)
        connection = HTTPConnection(str(to.hostname), to.port, timeout=60)
        try:
            headers = {name: value for name, value in call.headers.items() if name.lower() not in _HOP}
            connection.request(call.method, call.path, call.body, headers)
            got = connection.getresponse()
            kept = {name: value for name, value in got.getheaders() if name.lower() not in _HOP}
            if call.method == "HEAD":
                kept["Content-Length"] = got.getheader("Content-Length", "0")
            return Answer(got.status, kept, got.read())
        finally:
            connection.close()


def _with(call: Call, said: dict[str, Any]) -> Call:
    return Call(call.method, call.path, call.headers, json.dumps(said).encode())


def _handler(answer: Callable[[Call], Answer | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one_request(self) -> None:
            with suppress(ConnectionError):  # the client was killed, or gave up
                super().handle_one_request()

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                said = answer(Call(self.command, self.path, dict(self.headers), body))
            except (OSError, HTTPException):
                said = None
            if said is None:
                self._reset()
                return
            self.send_response(said.status)
            for name, value in ({"Content-Length": str(len(said.body))} | said.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)

        def _reset(self) -> None:
            """As a RST, not as an orderly end."""
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def faulty(aws: Aws, seed: int = 0) -> Iterator[tuple[Aws, Faults]]:
    """The server as seen through a proxy of one's own, and the proxy's faults."""
    faults = Faults(seed)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), _handler(Proxy(aws.url, faults).answer))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Aws(f"http://127.0.0.1:{server.server_port}"), faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
