"""One reader of task 0: subscribe, replay the stream, follow the channel; drop what was seen, read again on a gap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.protocol.model.scripts import Rules
from tests.protocol.model.state import State, spend

# A reader is (new | replay | follow, messages waiting on its channel, text seen, ended).


def reader_steps(s: State, rules: Rules) -> Iterator[tuple[str, bool, State]]:
    pc, channel, seen, ended = s.reader
    r = s.recs[0]
    reread = "reader_reread" in rules

    def to(*reader: Any) -> State:
        return s._replace(reader=reader)

    if ended or r is None:
        return
    if pc == "new":
        yield "reader subscribes", True, to("replay" if reread else "follow", (), seen, False)
    elif pc == "replay":
        whole = seen + r.stream[len(seen) :]
        yield "reader replays", True, to("follow", () if r.end else channel, whole, bool(r.end))
    elif channel:
        (kind, n, token), rest = channel[0], channel[1:]
        if n > len(seen) and reread:
            yield "reader sees a gap", True, to("replay", rest, seen, False)
        elif kind == "end":
            yield "reader gets the end", True, to("follow", (), seen, True)
        elif n < len(seen) and "reader_dedupe" in rules:
            yield "reader drops a duplicate", True, to(pc, rest, seen, False)
        else:
            yield "reader gets a token", True, to(pc, rest, (*seen, token), False)
        if b := spend(s, "drop"):
            yield "reader's connection drops", False, to(pc, (), seen, False)._replace(budget=b)
    elif reread and (len(r.stream) > len(seen) or r.end):
        yield "reader: silence", True, to("replay", channel, seen, False)
