"""Messages as senders never send them: valid ones of each kind, changed at every level.

A message is a JSON envelope (kombu), with headers and properties (Celery) and an encoded body: [args, kwargs, embed].
Penstock's own clients send an empty body and keep the task in a record, which may say something else, or be broken.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from producers.contract import keys
from producers.contract.message import Message
from tests.fuzz.trees import VALUES, Raw, json_bytes, spoiled, spoiled_bytes

#: Stands where a message's id is to be, which is given when it is sent: no two have the same by chance.
ID = "@fuzz-id@"

#: Names that Celery itself registers, with every application: what they are told is as much of a stranger's.
OTHER_TASKS = (
    *("celery.accumulate", "celery.chord", "celery.chord_unlock", "celery.backend_cleanup", "celery.chunks"),
    *("celery.group", "celery.map", "celery.starmap", "celery.chain", "no.such.task", "", "penstock.generat"),
)
ETAS = (
    *(None, None, "2020-01-01T00:00:00", "2020-01-01T00:00:00+00:00", "2199-01-01T00:00:00+00:00", "2199-01-01"),
    *("9999-12-31T23:59:59.999999-23:59", "0001-01-01T00:00:00+23:59", "tomorrow", "", 0, -1, 1e300, [], {}, True),
)
FIELD_BYTES = (
    *(b"", b" ", b"0", b"1", b"-1", b"2", b"65", b"1.5", b"1e3", b"1e400", b"nan", b"inf", b"0x10", b"x", b"\xff\xfe"),
    *(
        b"{}",
        b"[]",
        b"null",
        b"{oops",
        b"9" * 400,
        b"\x00",
        b"x" * 3000,
        b"queued",
        b"completed",
        b"in_progress",
        b"weird",
    ),
)
FIELDS = (
    *("v", "status", "task", "model", "queue", "tier", "n", "prompt_tokens", "tokens", "created", "queued", "started"),
    *("deadline", "ttl", "nonce", "plain", "cancel", "claim", "owner", "deaths", "claims", "lost", "stuck", "mark"),
    *("next:0", "next:1", "next:x", "prompt", "discarded", "end", "reasons", "usage", "error", "settled", "first"),
    *("began", "run:1", "given_back", "metadata", "webhook"),
)


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What goes on a list: `place` is its index in the lists that a worker reads.

    `record`: fields of the task's record, written before; None for a message without. `stream`: its entries.
    `in_the_way`: what stands at the record's key instead of a hash.
    """

    kind: str
    raw: bytes
    place: int
    record: dict[bytes, bytes] | None = None
    stream: tuple[bytes, ...] = ()
    in_the_way: bytes | None = field(default=None)

    def named(self, task_id: str) -> Fuzzed:
        """With this id where `ID` stands."""
        raw = self.raw.replace(ID.encode(), task_id.encode())
        return Fuzzed(self.kind, raw, self.place, self.record, self.stream, self.in_the_way)


def tasks(model: str) -> st.SearchStrategy[dict[str, Any]]:
    """Good ones, and short."""
    return st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(1, 200), min_size=1, max_size=8)
            | st.sampled_from(("def f", "x", "π = 3", "a b c")),
            "max_tokens": st.integers(0, 6),
        },
        optional={
            "model": st.just(model),
            "temperature": st.sampled_from((0, 0.0, 1, 0.7)),
            "n": st.integers(1, 3),
            "best_of": st.just(3),
            "seed": st.integers(0, 2**63 - 1),
            "tier": st.sampled_from(("auto", *keys.TIERS)),
            "tenant": st.sampled_from(("a", "b")),
            "stop": st.sampled_from(("x", ["a", "b"])),
            "logprobs": st.integers(0, 3),
            "prompt_logprobs": st.integers(0, 3),
            "timeout": st.sampled_from((0.001, 5, 600.0)),
            "ttl": st.integers(60, 90),
            "logit_bias": st.just({"5": 1.5}),
            "stop_token_ids": st.just([7]),
            "metadata": st.just({"a": "b"}),
        },
    )


def _headers(task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Message(ID, "q", "default", 1, 20).envelope())["headers"]
    return found | {"task": task}


@st.composite
def _envelope(draw: Any, headers: dict[str, Any], body: Any, encoding: str = "base64") -> bytes:
    """A whole message. Its body is spoiled before it is encoded, the rest after."""
    content = draw(json_bytes(draw(spoiled(body))))
    content = draw(spoiled_bytes(content))
    carried = base64.b64encode(content).decode() if encoding == "base64" else content.decode(errors="replace")
    message = json.loads(Message(ID, "q", "default", 1, 20).envelope()) | {"headers": headers, "body": carried}
    message["properties"]["priority"] = draw(st.sampled_from((0, 0, 3, 6, 9, 255)))
    if encoding != "base64":
        message["properties"]["body_encoding"] = None
    return draw(spoiled_bytes(draw(json_bytes(draw(spoiled(message))))))


def _embed() -> st.SearchStrategy[Any]:
    """What comes after a task: mostly nothing."""
    none = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    signature = {
        "task": "no.such.task",
        "args": [],
        "kwargs": {},
        "options": {},
        "subtask_type": None,
        "immutable": True,
    }
    return st.one_of(
        st.just(none),
        st.just(none),
        st.just(none | {"callbacks": [signature]}),
        st.just(none | {"errbacks": [signature], "chain": [signature]}),
        st.builds(lambda name, value: none | {name: value}, st.sampled_from(sorted(none)), VALUES),
    )


@st.composite
def _plain(draw: Any, model: str) -> Fuzzed:
    """As `app.send_task` sends it, also with Celery's options of every kind."""
    headers = _headers(keys.TASK_NAME)
    del headers["penstock"]
    if draw(st.booleans()):
        headers["eta"] = draw(st.sampled_from(ETAS))
        headers["expires"] = draw(st.sampled_from(ETAS))
        headers["retries"] = draw(st.sampled_from((0, 1, 3, 99, -1, None, "x")))
        headers["timelimit"] = draw(st.sampled_from(([None, None], [1, 1], [0, 0], [-1, "x"], None, [])))
        headers["ignore_result"] = draw(st.booleans())
    kwargs = draw(tasks(model) | spoiled(draw(tasks(model))))
    args = draw(st.sampled_from(([], [], [], ["x"], {}, None, [[]])))
    raw = draw(_envelope(headers, [args, kwargs, draw(_embed())], draw(st.sampled_from(("base64", "base64", "none")))))
    return Fuzzed("plain", raw, draw(st.integers(0, 63)))


@st.composite
def _client(draw: Any, model: str) -> Fuzzed:
    """As Penstock's clients send it; with its record, or one that says something else, or none."""
    headers = _headers(keys.TASK_NAME)
    size = {"v": 1, "n": 1, "tokens": 20}
    if draw(st.booleans()):
        size["tenant"] = draw(st.sampled_from(("a", "b", "c:d", "")) | VALUES)
    headers["penstock"] = draw(st.just(size) | spoiled(size))
    if draw(st.integers(0, 3)) == 0:
        headers["eta"] = draw(st.sampled_from(ETAS))
        headers["expires"] = draw(st.sampled_from(ETAS))
    nothing = [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    raw = draw(_envelope(headers, draw(st.just(nothing) | st.just([[], {"prompt": "x"}, {}]))))
    place = draw(st.integers(0, 63))
    how = draw(st.sampled_from(("good", "good", "spoiled", "spoiled", "spoiled", "none", "in the way")))
    if how == "none":
        return Fuzzed("client without a record", raw, place)
    if how == "in the way":
        return Fuzzed("client, its record's key is taken", raw, place, in_the_way=draw(st.sampled_from(FIELD_BYTES)))
    task = {"model": model, **draw(tasks(model))}
    if how == "spoiled":
        task = draw(spoiled(task))
    record = {
        b"v": b"1",
        b"status": draw(st.sampled_from((b"queued", b"submitting", b"queued", b"in_progress"))),
        b"task": draw(json_bytes(task)),
        b"model": model.encode(),
        b"queue": b"q",
        b"tier": b"default",
        b"n": b"1",
        b"tokens": b"20",
        b"nonce": b"",
    }
    stream: tuple[bytes, ...] = ()
    if how == "spoiled":
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.sampled_from(FIELDS)).encode()
            if draw(st.integers(0, 4)) == 0:
                record.pop(name, None)
            else:
                record[name] = draw(st.sampled_from(FIELD_BYTES))
        entries = (b'[0,0,5," w"]', b"{}", b"[]", b"{oops", b"[0,7,5]", b"\xff", b'{"end":"completed"}', b'[9,0,1,""]')
        stream = tuple(draw(st.lists(st.sampled_from(entries), max_size=2)))
    kind = "client with its record" if how == "good" else "client with a broken record"
    return Fuzzed(kind, raw, place, record, stream)


@st.composite
def _other(draw: Any) -> Fuzzed:
    """Of a task that is not the engine's."""
    headers = _headers(draw(st.sampled_from(OTHER_TASKS))) | {"ignore_result": False}
    if draw(st.booleans()):
        del headers["penstock"]
    body = [draw(st.sampled_from(([], [1], [[1, 2]], ["x", {}], None))), draw(VALUES | st.just({})), draw(_embed())]
    return Fuzzed("another task", draw(_envelope(headers, body)), draw(st.integers(0, 63)))


@st.composite
def _noise(draw: Any) -> Fuzzed:
    """No message at all."""
    raw = draw(
        st.one_of(st.binary(max_size=200), json_bytes(draw(VALUES)), json_bytes(draw(st.just(Raw("[" * 90_000)))))
    )
    return Fuzzed("noise", raw, draw(st.integers(0, 63)))


def messages(model: str) -> st.SearchStrategy[Fuzzed]:
    """One message of any kind, for a worker that serves `model`."""
    return st.one_of(_plain(model), _plain(model), _client(model), _client(model), _other(), _noise())
