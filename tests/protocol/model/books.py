"""SQS with its books on the store: two systems that no step changes at once (`docs/how/sqs.md`).

worker:  RECEIVE -> NOTE -> TAKE -> CLAIM ... SETTLE -> DeleteMessage -> DOWN (settled? else RELEASE and BACK)
         BACK -> visibility 0 -> BACK forgets        LETTER -> DeleteMessage -> DOWN
         DELAY -> DeleteMessage ... due: taken -> index -> sent -> removed
others:  REAP 1 (count, mark, index) -> visibility 0 -> REAP 2 (forget)      tidy      sent anew while it is kept

A field is (receipt, incarnation, message, what): `m` in the buffer, `given`, `letter`, `back`, `reaped`. A receipt has
its delivery's name. What is received and not noted has an entry and no field.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model.scripts import Rules
from tests.protocol.model.state import (
    DOWN,
    IDLE,
    SQS,
    Cfg,
    Field,
    Message,
    Slot,
    State,
    enqueue,
    fresh,
    is_suspect,
    put,
    spend,
    without,
)
from tests.protocol.model.worker import haunt, sent

Step = tuple[str, Slot, State]
Out = tuple[str, bool, State]

#: What a slot does with SQS and its books.
PLACES = frozenset(
    {"idle", "recv", "half_noted", "noted", "ack", "delete", "down", "back", "show", "forget"} | {"later", "half_later"}
)
#: Where a slot is about to remove its task's entry.
ENDING = ("ack", "delete", "down")
#: Faults after which an entry may stand for nothing until `tidy` has seen it.
BLUR = ("dup", "lost", "late", "pcrash", "age", "undo")


def place_steps(s: State, p: Slot, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """The steps of a slot at one of `PLACES`."""
    if p.pc == "idle":
        yield from _receive(s, inc, cfg, rules)
    elif p.pc in ("recv", "half_noted"):
        yield from _note(s, p, inc, rules)
    elif p.pc == "noted":
        yield from _take(s, p, inc, cfg, rules)
    elif p.pc == "ack" and p.note in ("dead", "buried"):
        yield from _letter(s, p)
    elif p.pc in ("ack", "delete"):
        for after in _delete(s, p.d, p.msg):
            yield "DeleteMessage", p._replace(pc="down"), after
        if b := spend(s, "late"):
            yield "DeleteMessage, which comes late", p._replace(pc="down"), _shown(s, p.d)._replace(budget=b)
    elif p.pc == "down":
        yield from _down(s, p, rules)
    elif p.pc == "back":
        yield from _back(s, p, rules)
    elif p.pc == "show":
        for said, after in _visible(s, p.d, p.msg, rules, cfg):
            yield said, p._replace(pc="forget"), after
    elif p.pc == "forget":
        after = s if "back_books" in rules or field_of(s, p.d) is None else _indexed(s, p.msg, rules)
        yield "BACK forgets", IDLE, _unfield(after, p.d)
    elif p.pc == "half_later":
        yield "DELAY, its second half", p._replace(pc="delete", note="stored"), _stored(s, p.msg[0])
    else:
        yield from _later(s, p, rules)


# ---- a worker ------------------------------------------------------------------------------------------------------


def _receive(s: State, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    mine = (q for q, w in zip(s.slots, cfg.workers, strict=True) if s.incs[w] == inc)
    if "lapse_first" in rules and any(q.note == "lapsed" for q in mine):
        return
    fields = s.fields | frozenset(s.reap[1] if s.reap else ())
    d = fresh({e[0] for e in s.infl} | {q.d for q in s.slots} | {f.d for f in fields})
    for m in sorted(set(s.queue)):
        got = s._replace(queue=without(s.queue, m), infl=s.infl | {(d, SQS, m)})
        yield f"RECEIVE task {m[0]}", Slot("recv", m, d), got


def _note(s: State, p: Slot, inc: int, rules: Rules) -> Iterator[Step]:
    """A message that the worker cannot enter goes back as it is: its entry still stands."""
    if inc not in s.lb and "note_lease" in rules:
        yield "NOTE -> lost", p._replace(pc="show"), s
    elif "note_once" not in rules and p.pc == "recv":
        yield "NOTE, its first half", p._replace(pc="half_noted"), _unindexed(s, p.msg[0])
    else:
        entered = s._replace(fields=s.fields | {Field(p.d, inc, p.msg, "m")})
        yield "NOTE", p._replace(pc="noted"), _unindexed(entered, p.msg[0])


def _take(s: State, p: Slot, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    field, t = field_of(s, p.d), p.msg[0]
    if field is None:
        yield "TAKE -> gone", IDLE, s
        return
    yield "is not taken up", p._replace(pc="back"), s
    others = (f for f in s.fields if f.inc == inc and f.what == "given" and f.d != p.d)
    alone = "suspect_alone" in rules and is_suspect(s, cfg, t) and any(is_suspect(s, cfg, f.msg[0]) for f in others)
    if inc not in s.lb or field.what not in ("m", "given") or alone:
        return
    c = fresh({q.c for q in s.slots} | {r.claim for r in s.recs if r})
    condemned = cfg.counting and s.reaped[t] >= cfg.limit and "condemned_first" in rules
    given = s._replace(fields=s.fields - {field} | {field._replace(what="given")})
    yield "TAKE", Slot("got", p.msg, p.d, c, (), "condemned" if condemned else ""), given
    if b := spend(s, "later"):
        yield "is to come later", p._replace(pc="later"), given._replace(budget=b)


def _letter(s: State, p: Slot) -> Iterator[Step]:
    """The field is marked with it: asked again, or found by REAP, the message is only deleted."""
    t, field = p.msg[0], field_of(s, p.d)
    if field is None:
        yield "LETTER -> gone", IDLE, s
    elif field.what == "letter":
        yield "LETTER", p._replace(pc="delete"), s
    else:
        kept = s._replace(dead=s.dead | {t}, fields=s.fields - {field} | {field._replace(what="letter")})
        yield "LETTER", p._replace(pc="delete"), haunt(kept, t, letters=min(2, s.ghosts[t].letters + 1))


def _down(s: State, p: Slot, rules: Rules) -> Iterator[Step]:
    """A task that its worker settled is settled; else a failover lost that."""
    t = p.msg[0]
    r = s.recs[t]
    if p.note not in ("released", "buried", "stored") and r and not r.settled and "ack_settled" in rules:
        yield "DOWN -> not settled", p._replace(pc="release_back"), s
        return
    after = _unfield(s, p.d)._replace(reaped=put(s.reaped, t, 0))
    over = r is None or r.settled or p.note in ("dead", "buried") or "down_settled" not in rules
    yield "DOWN", IDLE, _unindexed(after, t) if over else after


def _back(s: State, p: Slot, rules: Rules) -> Iterator[Step]:
    """Books, visibility, books, as REAP does. Who has no field any more, or one that REAP marked, does nothing."""
    field = field_of(s, p.d)
    if "back_books" not in rules:  # the wrong order
        yield "visibility first", p._replace(pc="show"), s
    elif (field is None or field.what == "reaped") and "back_gone" in rules:
        yield "BACK -> gone", IDLE, s
    else:
        fields = s.fields - {field} | {field._replace(what="back")} if field else s.fields
        after = s if field and field.what == "back" else _indexed(s, p.msg, rules)
        yield "BACK", p._replace(pc="show"), after._replace(fields=fields)


def _later(s: State, p: Slot, rules: Rules) -> Iterator[Step]:
    """Longer than SQS can: it waits in the store."""
    if field_of(s, p.d) is None:
        yield "DELAY -> gone", IDLE, s
    elif "delay_once" in rules:
        yield "DELAY", p._replace(pc="delete", note="stored"), _stored(_unfield(s, p.d), p.msg[0])
    else:
        yield "DELAY, its first half", p._replace(pc="half_later"), _unfield(s, p.d)


def lapsed_place(p: Slot) -> Slot:
    """What becomes of a slot whose worker learns that its lease is over: what is on its way goes on."""
    if p.pc in ("recv", "half_noted"):
        return p._replace(pc="show", note="lapsed")
    return p._replace(pc="back", note="lapsed") if p.pc in ("noted", "later") else p


# ---- others --------------------------------------------------------------------------------------------------------


def book_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Out]:
    """REAP, what is due, `tidy`, what is sent anew; any process does them, and may die of none of its own."""
    yield from _reap_steps(s, cfg, rules)
    yield from _due_steps(s, cfg, rules)
    for t, age in sorted(s.index):
        r = s.recs[t]
        done = r is None or (r.settled if "settled_only" in rules else r.end is not None)
        if done and "tidy" in rules:
            yield f"tidy forgets {t}", True, _unindexed(s, t)
        elif age == "old" and "sent_anew" in rules:
            yield f"{t} is sent anew", True, sent(s, cfg, t)
    yield from _ages(s, rules)


def _reap_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Out]:
    if s.reap is None:
        for inc in s.listed - s.lb:
            yield f"REAP inc{inc}", True, _reaped(s, inc, cfg, rules)
        return
    inc, entries = s.reap
    if b := spend(s, "pcrash"):
        yield "who REAPs crashes", False, s._replace(reap=None, budget=b)
    if entries:
        field, *rest = entries
        left = s._replace(reap=(inc, tuple(rest)))
        if field.what == "letter" and "letter_deleted" in rules:
            for after in _delete(left, field.d, field.msg):
                yield "REAP deletes", True, after
        else:
            for said, after in _visible(left, field.d, field.msg, rules, cfg):
                yield f"REAP: {said}", True, after
        return
    over = {f for f in s.fields if f.inc == inc}
    after = s._replace(reap=None, listed=s.listed - {inc}, fields=s.fields - over)
    for f in over:
        if f.what == "letter":
            after = _unindexed(after, f.msg[0])
        elif "reap_index" not in rules:
            after = _unless_settled(after, f.msg, rules)
    yield f"REAP forgets inc{inc}", True, after


def _reaped(s: State, inc: int, cfg: Cfg, rules: Rules) -> State:
    """Its first script: each field is counted and indexed once."""
    after, marked = s, []
    for f in sorted(f for f in s.fields if f.inc == inc):
        mark = f if f.what in ("letter", "back") else f._replace(what="reaped")
        marked.append(mark)
        t = f.msg[0]
        if f.what == "letter" and "reap_over" in rules:
            after = after._replace(reaped=put(after.reaped, t, 0))
        if f.what in ("letter", "reaped", "back"):
            continue
        after = after._replace(fields=after.fields - {f} | {mark})
        if cfg.counting and "reap_counts" in rules and (f.what == "given" or "reap_given" not in rules):
            after = after._replace(reaped=put(after.reaped, t, min(after.reaped[t] + 1, cfg.limit)))
        if "reap_index" in rules:
            after = _unless_settled(after, f.msg, rules)
    return after._replace(reap=(inc, tuple(marked)))


def _unless_settled(s: State, m: Message, rules: Rules) -> State:
    r = s.recs[m[0]]
    done = r is None or (r.settled if "settled_only" in rules else r.end is not None)
    return s if done else _indexed(s, m, rules)


def _due_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Out]:
    """Taken from the store for a while -> index -> sent -> removed."""
    if s.due is None:
        for t in sorted(s.stored):
            kept = s.stored if "due_kept" in rules else s.stored - {t}
            yield f"{t} is due", True, s._replace(due=("send", t), stored=kept)
        return
    what, t = s.due
    if what == "send":
        yield f"{t} is sent, since due", True, sent(s, cfg, t)._replace(due=("end", t))
    else:
        yield f"{t} leaves the store", True, s._replace(due=None, stored=s.stored - {t})
    if b := spend(s, "pcrash"):
        yield "who sends what is due crashes", False, s._replace(due=None, budget=b)


def _ages(s: State, rules: Rules) -> Iterator[Out]:
    """Retention: SQS drops what is old, but not within the day in which an old entry is seen and sent anew. What nobody
    needs is dropped at last."""
    copies = {*s.queue, *(e[2] for e in s.infl)}
    if copies and (b := spend(s, "age")):
        index = frozenset((t, "old" if age == "true" else age) for t, age in s.index)
        old = frozenset(m for m in copies if s.recs[m[0]] is not None)
        yield "all that is there is old", False, s._replace(old=old, index=index, budget=b)
    for m in sorted(s.old & copies):
        if (m[0], "old") not in s.index or "sent_anew" not in rules:
            yield f"SQS drops old {m[0]}", False, _dropped(s, m)
    for m in sorted(copies) if DOWN in s.incs else ():
        r = s.recs[m[0]]
        if r is None or r.settled:
            yield f"SQS drops {m[0]} at last", True, _dropped(s, m)


def _dropped(s: State, m: Message) -> State:
    """All of a message: of those alike, one."""
    queue = without(s.queue, m) if m in s.queue else s.queue
    return s._replace(queue=queue, infl=frozenset(e for e in s.infl if e[2] != m), old=s.old - {m})


# ---- small things --------------------------------------------------------------------------------------------------


def _stored(s: State, t: int) -> State:
    return s._replace(stored=s.stored | {t})


def field_of(s: State, d: int) -> Field | None:
    return next((f for f in s.fields if f.d == d), None)


def _indexed(s: State, m: Message, rules: Rules) -> State:
    """What comes back is as old as it is, or else as new as if it were sent now."""
    age = "true" if "entry_age" in rules else "new"
    return s if (m[0], "old") in s.index else _unindexed(s, m[0])._replace(index=s.index | {(m[0], age)})


def _unindexed(s: State, t: int) -> State:
    return s._replace(index=frozenset(one for one in s.index if one[0] != t))


def _unfield(s: State, d: int) -> State:
    return s._replace(fields=frozenset(f for f in s.fields if f.d != d))


def _delete(s: State, d: int, m: Message) -> list[State]:
    """By the latest receipt, or by a stale one, which may or may not do it."""
    if any(e[0] == d for e in s.infl):
        return [s._replace(infl=frozenset(e for e in s.infl if e[0] != d))]
    if not _exists(s, m):
        return [s]
    return [s, _dropped(s, m)]


def _shown(s: State, d: int) -> State:
    hit = [e for e in s.infl if e[0] == d]
    return s._replace(infl=s.infl - set(hit), queue=enqueue(s.queue, *(e[2] for e in hit)))


def _visible(s: State, d: int, m: Message, rules: Rules, cfg: Cfg) -> Iterator[tuple[str, State]]:
    """Visibility 0. What SQS does not have any more is sent again, unless nobody needs it."""
    r = s.recs[m[0]]
    if m in s.old and "old_anew" in rules and r is not None and not r.settled:
        for after in _delete(sent(s, cfg, m[0]), d, m):
            yield f"{m[0]} is old: sent anew, and deleted", after
    elif any(e[0] == d for e in s.infl):
        yield f"visibility 0 of {m[0]}", _shown(s, d)
    elif _exists(s, m):
        yield f"visibility 0 of {m[0]} by a stale receipt", s
        other = next((e[0] for e in s.infl if e[2] == m), None)
        if other is not None and not cfg.killer:
            yield f"visibility 0 of {m[0]}, which another has", haunt(_shown(s, other), m[0], blurred=True)
    elif r is not None and not r.settled and "lost_anew" in rules:
        yield f"{m[0]} is no more, and sent again", haunt(sent(s, cfg, m[0]), m[0], blurred=True)
    else:
        yield f"{m[0]} is no more", s


def _exists(s: State, m: Message) -> bool:
    return m in s.queue or any(e[2] == m for e in s.infl)


# ---- what must never be seen ---------------------------------------------------------------------------------------


def wrong_books(s: State, cfg: Cfg, used: dict[str, int]) -> str:
    """S19 and S20 of one world. `used`: faults that happened."""
    there = {t for t, _ in s.index} | {f.msg[0] for f in s.fields} | s.stored
    held = {p.d for p in s.slots if p.d}
    coming = {m[0] for m in s.queue} | {e[2][0] for e in s.infl if e[0] not in held or not field_of(s, e[0])}
    coming |= {p.msg[0] for p in s.slots if p.msg and p.pc in ("recv", "half_noted", "show", *ENDING)}
    coming |= {f.msg[0] for f in s.reap[1]} if s.reap else set()
    blurred = any(used[fault] for fault in BLUR)
    for t, (r, g) in enumerate(zip(s.recs, s.ghosts, strict=True)):
        if g.letters > 1 and not (blurred or g.blurred or used["expire"]):
            return "S21 a message left two dead letters"
        if r is None or r.settled or t in s.dead or not g.accepted:
            continue
        if r.status != "submitting" and t not in there:
            return "S19 a task waits, and is neither in the index nor in flight nor stored"
        sending = any(pc == "send" for p, pc in enumerate(s.prods) if p % cfg.tasks == t)
        if t in {one for one, _ in s.index} and t not in coming and not (blurred or g.blurred or sending):
            return "S20 the index has what does not wait, and nothing went wrong"
    return ""
