"""One reader of task 0: subscribe, replay the stream, follow the channel; drop what was seen, read again on a gap.

Its process may have a channel of its own, on which it is told of all tasks that it has entered itself for (`follows`):

    the task's channel -> replay -> FOLLOW -> heard on the process's channel: the task's channel is left
    RELEASE is told, silence, a new connection -> the task's channel again -> replay

Workers of the release before know the task's channel alone.

And its lease, where it has one: held, renewed, lapsed; found lapsed by a sweeper, which cancels the task then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.protocol.model import scripts
from tests.protocol.model.scripts import FINAL, Rules
from tests.protocol.model.state import Cfg, State, spend
from tests.protocol.model.worker import haunt, store

# A lease is (held | lapsed | none, whether its reader lives, what a sweeper has found lapsed: nothing, this or an old
# one).
# A reader is (new | replay | second | follow | cut, messages waiting on its channels, text seen, ended, what it hears).
# A message is (tok | end | released, position, token, whether it came by the process's channel).
# It hears: `own`, the task's channel; `entered`, the process's, as the store has it. `late`: what a worker of the
# release before published was not heard, since the one before it died, and the stream has not been read since.


def reader_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[tuple[str, bool, State]]:
    pc, channel, seen, ended, hears = s.reader
    r = s.recs[0]
    reread = "reader_reread" in rules

    def to(pc: str, channel: Any, seen: Any, ended: bool, now: Any = hears) -> State:
        return s._replace(reader=(pc, channel, seen, ended, now))

    if ended or r is None:
        return
    if cfg.follows and pc != "new" and "entered" not in hears and "own" in hears and not r.end:
        now = hears | {"entered"} if "follow_proven" in rules else (hears | {"entered"}) - {"own"}
        yield "FOLLOW", True, s._replace(reader=(pc, channel, seen, ended, now))
    if cfg.follows and pc not in ("new", "cut") and (b := spend(s, "drop")):
        yield "reader's connection drops", False, to("cut", (), seen, False, hears - {"own"})._replace(budget=b)
    if pc == "cut":
        pc = "replay" if "follow_reread" in rules else "follow"
        yield "reader's connection is back", True, to(pc, (), seen, False, hears | {"own"})
    elif pc == "new":
        yield "reader subscribes", True, to("replay" if reread else "follow", (), seen, False, hears | {"own"})
    elif pc in ("replay", "second"):
        # The stream, then the result, each with a call of its own.
        places = ("stream", "result") if "read_stream_first" in rules else ("result", "stream")
        if r.at == places[pc == "second"]:
            whole = seen + r.stream[len(seen) :]
            yield "reader replays", True, to("follow", () if r.end else channel, whole, bool(r.end), hears - {"late"})
        elif pc == "replay":
            yield f"reader finds no {places[0]}", True, to("second", channel, seen, False)
        else:
            yield f"reader finds no {places[1]}", True, to("follow", channel, seen, bool(r.end), hears - {"late"})
    elif channel:
        (kind, n, token, by_process), rest = channel[0], channel[1:]
        hears = hears - {"own"} if by_process else hears
        if kind == "released":
            back = ("replay", hears | {"own"}) if "release_tells" in rules else (pc, hears)
            yield "reader hears of RELEASE", True, to(back[0], rest, seen, False, back[1])
        elif n > len(seen) and reread:
            yield "reader sees a gap", True, to("replay", rest, seen, False, hears)
        elif kind == "end":
            yield "reader gets the end", True, to("follow", (), seen, True, hears)
        elif n < len(seen) and "reader_dedupe" in rules:
            yield "reader drops a duplicate", True, to(pc, rest, seen, False, hears)
        else:
            yield "reader gets a token", True, to(pc, rest, (*seen, token), False, hears)
        if not cfg.follows and (b := spend(s, "drop")):
            yield "reader's connection drops", False, to(pc, (), seen, False)._replace(budget=b)
    elif reread and (len(r.stream) > len(seen) or r.end):
        yield "reader: silence", True, to("replay", channel, seen, False, hears | {"own"})


def lease_steps(s: State, rules: Rules) -> Iterator[tuple[str, bool, State]]:
    """How long a sweeper waits between LAPSED and UNREAD is not modelled: a living reader may renew its lease too late,
    and its task is cancelled. It must not be where the lease was renewed in time.
    """
    state, lives, found = s.lease
    r = s.recs[0]
    ended = r is not None and r.status in FINAL

    def to(*lease: Any) -> State:
        return s._replace(lease=lease)

    if lives and (b := spend(s, "leave")):
        yield "the gateway of the reader dies", False, to(state, False, found)._replace(budget=b)
    if state == "held" and lives and (b := spend(s, "lapse")):
        yield "the lease of a living reader lapses", False, to("lapsed", lives, found)._replace(budget=b)
    if state == "held" and not lives:
        yield "the lease of a dead reader lapses", True, to("lapsed", lives, found)
    if lives and ended and state != "none":
        yield "the reader leaves at the end", True, to("none", lives, found)
    if lives and not ended and state != "held" and s.ghosts[0].accepted:
        yield "the reader renews its lease", True, to("held", lives, found and "old")
    if state == "lapsed" and found != "this":
        yield "LAPSED", True, to(state, lives, "this")
    if not found:
        return
    # What was found ended at 1; what was renewed since ends at 2.
    ends = None if state == "none" else 1 if state == "lapsed" and found == "this" else 2
    said, left, after = scripts.unread(r, ends, 1, 1, s.ls, rules)
    s2 = to(state if left else "none", lives, "")
    if said:
        s2 = haunt(store(s2, 0, after), 0, cancelled=said[0] or s.ghosts[0].cancelled)
        if state == "held":
            s2 = haunt(s2, 0, bad="S11 a task was cancelled for a reader's lease that had been renewed")
    yield f"UNREAD -> {said}", True, s2
    if lost := spend(s, "lost"):
        yield f"UNREAD -> {said}, reply lost", False, s2._replace(lease=(*s2.lease[:2], found), budget=lost)
