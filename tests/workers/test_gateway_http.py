"""Streams of server-sent events, each cut at every byte."""

from __future__ import annotations

import pytest

from workers.gateway_http import Event, EventStream


def messages(*data: str) -> list[Event]:
    """Events that name no kind and no id."""
    return [Event("message", each, "") for each in data]


#: Each stream, and the events in it.
WHOLE = {
    b"": [],
    b"data: a\n\n": messages("a"),
    b"data:a\n\ndata:  b\n\n": messages("a", " b"),
    b"id: 0\nevent: token\ndata: {}\n\nevent: end\ndata: x: y\n\n": [
        Event("token", "{}", "0"),
        Event("end", "x: y", "0"),
    ],
    b"data: a\r\n\r\ndata: b\r\rdata: c\n\r\n\r\n": messages("a", "b", "c"),
    b"data: a\ndata\ndata:\ndata: b\n\n": messages("a\n\n\nb"),
    b"data:\n\ndata\n\n": messages("", ""),
    b": hello\n\n:\n\nretry: 1000\n\nxdata: a\nDATA: b\n\n": [],
    b"data: a\n: hello\ndata: b\n\n": messages("a\nb"),
    b"event: lost\n\ndata: a\n\n": messages("a"),
    b"id: 7\n\nid: 8\0\ndata: a\n\nid\ndata: b\n\n": [Event("message", "a", "7"), Event("message", "b", "")],
    "data: é\u2028\x0b\x85🙂\n\n".encode(): messages("é\u2028\x0b\x85🙂"),
    b"data: \xff\xc3\n\n": messages("\ufffd\ufffd"),
    b"data: a\r\n\r": messages("a"),
    b"\n\r\n\r: hello\n": [],
}
#: Streams that break off within an event.
BROKEN = {
    b"data: a\n\ndata: b\n": messages("a"),
    b"data: a\n\ndata": messages("a"),
    b"data: a\n\nevent: token\n": messages("a"),
}


@pytest.mark.parametrize("stream", [*WHOLE, *BROKEN])
def test_events_are_the_same_wherever_the_stream_is_cut(stream: bytes) -> None:
    cuts = [[stream[:k], stream[k:]] for k in range(len(stream) + 1)]
    for pieces in (*cuts, [stream[k : k + 1] for k in range(len(stream))]):
        parser = EventStream()
        assert [event for piece in pieces for event in parser.feed(piece)] == (WHOLE | BROKEN)[stream]
        assert parser.within == (stream in BROKEN)


def test_comments_are_told() -> None:
    comments: list[str] = []
    parser = EventStream(comments.append)
    assert parser.feed(b": waits for: a worker\n\n:\n\n: still here\r\n\r\ndata: :x\n\n") == messages(":x")
    assert comments == ["waits for: a worker", "", "still here"]


def test_an_event_is_given_with_the_piece_that_ends_it() -> None:
    parser = EventStream()
    given = [len(parser.feed(piece)) for piece in (b"data: a\r\n\r", b"\n", b"data: b\n", b"\ndata: c", b"\n\n")]
    assert given == [1, 0, 0, 1, 1]
