"""Workers that are not there, and what they leave: sorted messages, lists of incarnations; and what comes back unknown.

scaler:  sees the list alone -> starts a worker: LEASE(take)
sweeper: RECALL, one message at a time, where no worker has a lease (a page of a real one may be as small)
worker:  reads its books -> STRAYS -> found for the second time: RELEASE -> BACK
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model import scripts
from tests.protocol.model.scripts import FINAL, QUEUED, Rules, able, level_of
from tests.protocol.model.state import Cfg, Look, State, enqueue, fresh, of_kind, order, put, serving, spend, without
from tests.protocol.model.worker import haunt, store

Step = tuple[str, bool, State]  # label, fair?, the world after it


def enlisted(s: State, w: int, cfg: Cfg, rules: Rules) -> State:
    """LEASE(take) of what worker w is now."""
    return s._replace(listed=s.listed | {s.incs[w]}) if cfg.scaled and "lease_listed" in rules else s


def down_steps(s: State, w: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Process w does not run; it is started where the list is not empty."""
    if s.index or any(len(m) < 3 or m[2][1] is None for m in s.queue if not cfg.books):
        used = (
            s.incs,
            s.lb,
            s.ls,
            s.listed,
            {f.inc for f in s.fields},
            {e[1] for e in s.infl},
            {r.owner for r in s.recs if r},
        )
        inc = fresh(set().union(*used))
        up = s._replace(incs=put(s.incs, w, inc), lb=s.lb | {inc}, ls=s.ls | {inc}, kinds=of_kind(s, w, inc, cfg))
        yield f"worker {w} is started, LEASE(inc{inc})", True, enlisted(up, w, cfg, rules)


def hold_steps(s: State, w: int) -> Iterator[Step]:
    """A worker's breaker opens; at last it closes, or its process is another."""
    if w in s.held:
        yield f"worker {w} serves again", True, s._replace(held=s.held - {w})
    elif b := spend(s, "hold"):
        yield f"worker {w} is held back", False, s._replace(held=s.held | {w}, budget=b)


def recall_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """What was sorted goes back to the list. Any order: none is modelled."""
    if not cfg.scaled or "recall" not in rules:
        return
    for m in sorted({m for m in s.sorted if len(m) < 3 or m[2][1] is None}, key=order):
        # Workers of an earlier release take nothing from the queue of what needs a later one.
        level = level_of(m[2]) if len(m) > 2 and "recall_able" in rules else 0
        lives = able(m[2], level, serving(s, s.lb)) if level else bool(s.lb)
        if lives and "recall_unserved" in rules:
            continue
        after = s._replace(sorted=without(s.sorted, m), queue=enqueue(s.queue, m))
        if lives:
            after = haunt(after, m[0], bad="S13 what a live worker had sorted was taken from it")
        yield f"RECALL {m[0]}", True, after


def adopt_steps(s: State, rules: Rules) -> Iterator[Step]:
    """What waits for a pool goes to its version's queue, sorted or not: that of all, where nothing is for one
    version; or that of the level that it needs."""
    lives = serving(s, s.lb)
    for m in sorted({m for m in (*s.queue, *s.sorted) if len(m) > 2 and m[2][1] is not None}, key=order):
        need = level_of(m[2])
        served = able(m[2], need if "adopt_able" in rules else 0, lives)
        if "adopt" not in rules or (served and "adopt_unserved" in rules):
            continue
        queue, left = (without(s.queue, m), s.sorted) if m in s.queue else (s.queue, without(s.sorted, m))
        home = ((m[2][0], None, need),) if need and "adopt_level" in rules else ()
        after = s._replace(queue=enqueue(queue, (*m[:2], *home)), sorted=left)
        if able(m[2], need, lives):
            after = haunt(after, m[0], bad="S16 what waits for a live pool was taken from it")
        yield f"ADOPT {m[0]}", True, after


def look_steps(s: State, w: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Worker w looks for what is in flight under its name and not in its books."""
    inc = s.incs[w]
    if not cfg.strays or "strays" not in rules or inc not in s.lb:
        return
    look = s.looks[w]
    mine = {e[0]: e for e in s.infl if e[1] == inc}

    def to(state: State, pc: str, what: frozenset[int] = frozenset(), seen: frozenset[int] = look.seen) -> State:
        return state._replace(looks=put(state.looks, w, Look(pc, what, seen)))

    if look.pc == "books":
        held = frozenset(p.d for i, p in enumerate(s.slots) if cfg.workers[i] == w and p.d)
        yield f"worker {w} reads its books", True, to(s, "look", held)
    elif look.pc == "look":
        found = frozenset(mine) - look.what
        lasting = found & look.seen if "strays_twice" in rules else found
        yield f"STRAYS {sorted(lasting)}", True, to(s, "release" if lasting else "books", lasting, found - lasting)
    elif look.pc == "release":
        # A claim is named as its delivery.
        claims = dict(s.unknown) | {p.d: p.c for p in s.slots if p.d}
        after = s
        for uuid in look.what & mine.keys():
            t = mine[uuid][2][0]
            after = store(after, t, scripts.release(after.recs[t], claims.get(uuid), rules)[1])
        yield f"worker {w} RELEASEs strays", True, to(after, "back", look.what)
    else:
        back = [mine[uuid] for uuid in look.what & mine.keys()]
        after = s._replace(infl=s.infl - set(back), queue=enqueue(s.queue, *(e[2] for e in back)))
        yield f"worker {w} gives strays BACK", True, to(after, "books")


def unack_steps(s: State, t: int, cfg: Cfg) -> Iterator[Step]:
    """A failover loses the ACK: the message is in flight of a live worker that has forgotten it. The record is what it
    is (another server's), or as it was: claimed, or not yet."""
    r = s.recs[t]
    b = spend(s, "unack")
    if not b or r is None or r.status not in FINAL or not r.settled:
        return
    if any(m[0] == t for m in (*s.queue, *(e[2] for e in s.infl), *(p.msg for p in s.slots if p.msg))):
        return
    uuid = fresh({e[0] for e in s.infl} | {p.d for p in s.slots})
    claim = fresh({p.c for p in s.slots} | {r.claim for r in s.recs if r})
    undone = s.ghosts[t]._replace(final=None, links=0, excused=True, undone=True)
    for w, inc in enumerate(s.incs):
        if inc not in s.lb:
            continue
        after = s._replace(infl=s.infl | {(uuid, inc, (t, 0))}, budget=b)
        yield f"failover brings {t} back in flight of worker {w}", False, after
        after = after._replace(ghosts=put(s.ghosts, t, undone))
        claimed = QUEUED._replace(status="in_progress", claim=claim, owner=inc, dated=True, waits=0)
        yield (
            f"... and its record as it was, claimed by worker {w}",
            False,
            after._replace(recs=put(s.recs, t, claimed), unknown=s.unknown | {(uuid, claim)}),
        )
        yield "... and its record as it was, queued", False, after._replace(recs=put(s.recs, t, QUEUED))
