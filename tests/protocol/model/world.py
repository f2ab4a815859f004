"""Every step that may come next: of slots, leases, the reaper, and all that is outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.protocol.model.alive import alive_steps, begun_anew, born, is_asleep, servers, written
from tests.protocol.model.books import PLACES, book_steps, lapsed_place, place_steps
from tests.protocol.model.fleet import (
    adopt_steps,
    down_steps,
    enlisted,
    hold_steps,
    look_steps,
    recall_steps,
    unack_steps,
)
from tests.protocol.model.outbox import outbox_steps
from tests.protocol.model.outside import (
    client_steps,
    compact_steps,
    expiry_steps,
    fault_steps,
    orphan_steps,
    producer_steps,
    sweeper_steps,
)
from tests.protocol.model.reader import lease_steps, reader_steps
from tests.protocol.model.scripts import Rules
from tests.protocol.model.state import (
    DOWN,
    IDLE,
    NOBODY,
    SQS,
    Cfg,
    Ghost,
    Look,
    Message,
    Slot,
    State,
    enqueue,
    fresh,
    of_kind,
    put,
    queued_record,
    spend,
    toxic,
)
from tests.protocol.model.worker import haunt, heard, slot_steps, take_back

Step = tuple[str, bool, State]  # label, fair?, the world after it


def _first(cfg: Cfg, t: int) -> Message:
    """The message of a task, as it was sent."""
    if cfg.sqs:
        return (t, t)
    return (t, 0, (0, None, cfg.need)) if cfg.need else (t, 0)


def _reader(cfg: Cfg) -> Any:
    """One that follows a task which is yet to be submitted has listened before, and ADMIT says that it follows it."""
    if cfg.follows and not cfg.sent:
        return ("follow", (), (), False, frozenset({"own", "entered"}))
    return ("new", (), (), False, frozenset())


def start(cfg: Cfg) -> State:
    incs = tuple(range(1, max(cfg.workers) + 2))
    sent = cfg.sent  # start where the producers have done their part
    return State(
        queue=tuple(_first(cfg, t) for t in range(cfg.tasks)) if sent else (),
        infl=frozenset(),
        lb=frozenset(incs),
        ls=frozenset(incs),
        incs=incs,
        slots=(IDLE,) * len(cfg.workers),
        recs=(queued_record(cfg)._replace(kind=(0, None) if cfg.kinds else None) if sent else None,) * cfg.tasks,
        ghosts=(Ghost(sent, spared=cfg.native),) * cfg.tasks,
        prods=("done" if sent else "send" if cfg.plain else "admit",) * (cfg.tasks * (1 + cfg.rival)),
        sweep=None,
        reader=_reader(cfg) if cfg.reader else None,
        lease=("held", True, "") if cfg.lease else None,
        reaped=(0,) * cfg.tasks,
        dead=frozenset(),
        kills=0,
        budget=cfg.budget,
        listed=frozenset(incs) if cfg.scaled or cfg.books or cfg.alive else frozenset(),
        looks=(Look(),) * len(incs) if cfg.strays else (),
        kinds=frozenset(zip(incs, cfg.kinds, strict=True)) if cfg.kinds else frozenset(),
        rows=((),) * cfg.tasks if cfg.posts else (),
        posts=(NOBODY,) * cfg.posts,
        index=frozenset((t, "true") for t in range(cfg.tasks)) if cfg.books and sent else frozenset(),
        alive=frozenset().union(*(born(inc, cfg, stood=True) for w, inc in enumerate(incs) if w not in cfg.old))
        if cfg.alive
        else frozenset(),
    )


def steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    for i in range(len(s.slots)):
        yield from _slot(s, i, cfg, rules)
    for w, inc in enumerate(s.incs):
        yield from _process(s, w, inc, cfg, rules)
        yield from hold_steps(s, w)
    yield from _leases(s, cfg)
    yield from _returns(s, cfg, rules)
    yield from recall_steps(s, cfg, rules)
    yield from adopt_steps(s, rules)
    if cfg.books:
        yield from book_steps(s, cfg, rules)
    if cfg.alive:
        yield from alive_steps(s, cfg, rules)
    for p in range(len(s.prods)):
        if s.prods[p] != "done":
            yield from producer_steps(s, p, cfg, rules)
    yield from sweeper_steps(s, cfg, rules)
    for t in range(cfg.tasks):
        yield from client_steps(s, t, cfg, rules)
        yield from expiry_steps(s, t, rules)
        yield from orphan_steps(s, t, cfg, rules)
        yield from compact_steps(s, t, cfg, rules)
        yield from fault_steps(s, t, cfg, rules)
        yield from unack_steps(s, t, cfg)
    if s.reader:
        yield from reader_steps(s, cfg, rules)
    if s.lease:
        yield from lease_steps(s, rules)
    if s.posts:
        yield from outbox_steps(s, cfg, rules)
    if b := spend(s, "turn"):
        yield "from now on task 0 kills whoever decodes it", False, s._replace(budget=b)


def _slot(s: State, i: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    if s.incs[cfg.workers[i]] == DOWN or is_asleep(s, s.incs[cfg.workers[i]]):
        return
    p, lost = s.slots[i], spend(s, "lost")
    me = f"slot{i}(inc{s.incs[cfg.workers[i]]}) "
    at_sqs = cfg.books and p.pc in PLACES
    nexts = place_steps(s, p, s.incs[cfg.workers[i]], cfg, rules) if at_sqs else slot_steps(s, i, cfg, rules)
    for label, after, s2 in nexts:
        if cfg.follows and cfg.workers[i] in cfg.old:
            s2 = s2._replace(reader=heard(s, s2.recs[0], by_old=True))
        yield me + label, True, s2._replace(slots=put(s.slots, i, after))
        if lost and p.pc not in ("hold", "trace", "popped"):
            again = p
            if p.pc == "idle":
                again = Slot("refetch", d=after.d) if "fetch_idem" in rules and not cfg.sqs else IDLE
            yield me + label + ", reply lost", False, s2._replace(slots=put(s.slots, i, again), budget=lost)
    if p.pc not in ("score", "run") or toxic(s, cfg, p):
        return
    for fault, pc in (("drain", "release_back"), ("retry", "retry_pub" if "retry_order" in rules else "retry_ack")):
        if b := spend(s, fault):
            yield me + fault, False, s._replace(slots=put(s.slots, i, p._replace(pc=pc)), budget=b)
    if "abandon_ends" not in rules:
        for after_back in take_back(s, cfg, p, rules, True):
            yield me + "puts the task down without RELEASE", False, after_back._replace(slots=put(s.slots, i, IDLE))


def bereave(s: State, inc: int) -> State:
    """An incarnation was lost: links of what it owned may go out a second time."""
    ghosts = tuple(
        g._replace(excused=True) if r and r.owner == inc and not r.settled else g
        for r, g in zip(s.recs, s.ghosts, strict=True)
    )
    return s._replace(ghosts=ghosts)


def reborn(s: State, w: int, cfg: Cfg) -> State:
    """The worker process w starts again (after a crash, or because its lease was lost) as a new incarnation."""
    s = bereave(s, s.incs[w])
    known = (
        s.lb
        | s.ls
        | s.listed
        | {w[1] for w in s.watch}
        | {e[1] for e in s.infl}
        | {r.owner for r in s.recs if r}
        | {f.inc for f in s.fields}
    )
    inc = fresh(set(s.incs) | known | ({s.reap[0]} if s.reap else set()))
    since = s.since.union(*(written(s, w, inc, cfg, x) for x in servers(cfg))) if cfg.alive else s.since
    return s._replace(
        since=since,
        slots=tuple(IDLE if cfg.workers[i] == w else p for i, p in enumerate(s.slots)),
        incs=put(s.incs, w, inc),
        lb=s.lb | {inc},
        ls=s.ls | {inc},
        listed=s.listed | {inc} if cfg.books or cfg.alive else s.listed,
        alive=s.alive | born(inc, cfg) if cfg.alive and w not in cfg.old else s.alive,
        looks=put(s.looks, w, Look()) if cfg.strays else (),
        kinds=of_kind(s, w, inc, cfg),
    )


def lapsed(s: State, w: int, cfg: Cfg, rules: Rules) -> State:
    """The worker process w learns that its lease is over: all it held goes, RELEASEd, and it is born anew."""
    after = enlisted(reborn(s, w, cfg), w, cfg, rules)
    after = begun_anew(after, s.incs[w], after.incs[w]) if cfg.alive else after
    if "lapse_release" not in rules:
        return after
    let_go = (
        _let_go(p, cfg) if cfg.workers[i] == w and p.msg is not None else new
        for i, (p, new) in enumerate(zip(s.slots, after.slots, strict=True))
    )
    return after._replace(slots=tuple(let_go))


def _let_go(p: Slot, cfg: Cfg) -> Slot:
    """What becomes of what it held."""
    if cfg.books and p.pc in PLACES:
        return lapsed_place(p)
    return Slot("release_back", p.msg, p.d, p.c, (), "lapsed")


def _process(s: State, w: int, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    if inc == DOWN:
        yield from down_steps(s, w, cfg, rules)
        return
    mine = [p for i, p in enumerate(s.slots) if cfg.workers[i] == w]
    if any(toxic(s, cfg, p) for p in mine):
        dead = reborn(s, w, cfg)
        yield f"worker {w} (inc{inc}) dies of task 0", True, dead._replace(kills=min(s.kills + 1, cfg.killer + 1))
    busy = s.sorted or s.watch or any(p != IDLE for p in mine)
    if (b := spend(s, "crash")) and busy:
        after = reborn(s, w, cfg)
        if cfg.scaled:  # nobody starts it anew but whoever sees something in the list
            after = after._replace(incs=s.incs, lb=s.lb, ls=s.ls, listed=s.listed)
            after = after._replace(incs=put(s.incs, w, DOWN), kinds=s.kinds)
        yield f"crash of worker {w} (inc{inc})", False, after._replace(budget=b)
    if (inc not in s.lb or inc not in s.ls) and not is_asleep(s, inc):
        yield f"worker {w} learns that inc{inc} is over", True, lapsed(s, w, cfg, rules)
        if cfg.scaled and "lease_renews" not in rules:
            yield f"LEASE renews what lapsed of inc{inc}", False, s._replace(lb=s.lb | {inc}, ls=s.ls | {inc})
    yield from look_steps(s, w, cfg, rules)
    if (b := spend(s, "expire")) and (s.queue or s.sorted or s.infl):
        if inc in s.ls:
            both = s._replace(ls=s.ls - {inc}, lb=s.lb if cfg.split else s.lb - {inc}, budget=b)
            yield f"store lease of live inc{inc} lapses", False, bereave(both, inc)
        if cfg.split and inc in s.lb and not cfg.sqs:
            yield f"broker lease of live inc{inc} lapses", False, s._replace(lb=s.lb - {inc}, budget=b)


def _leases(s: State, cfg: Cfg) -> Iterator[Step]:
    for inc in (s.lb | s.ls) - set(s.incs):
        if not cfg.split:
            yield f"lease of dead inc{inc} lapses", True, s._replace(lb=s.lb - {inc}, ls=s.ls - {inc})
            continue
        if inc in s.lb:
            yield f"broker lease of dead inc{inc} lapses", True, s._replace(lb=s.lb - {inc})
        if inc in s.ls:
            yield f"store lease of dead inc{inc} lapses", True, s._replace(ls=s.ls - {inc})


def _returns(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """REAP; on SQS a lapsed visibility: at any time as a fault, for nothing once no one holds the delivery."""
    if cfg.sqs:
        held = {p.d for p in s.slots}
        for e in s.infl:
            if cfg.killer and any(f.d == e[0] for f in s.fields):
                continue  # hidden for longer than a lease: REAP comes first, and counts
            b = s.budget if e[0] not in held else spend(s, "dup")
            if b is not None:
                s2 = s._replace(infl=s.infl - {e}, queue=enqueue(s.queue, e[2]), budget=b)
                if any(f.d == e[0] for f in s.fields):
                    s2 = haunt(s2, e[2][0], blurred=True)
                yield f"visibility of task {e[2][0]} lapses", e[0] not in held, s2
        return
    if cfg.scaled and not any(inc in s.lb for inc in s.incs) and "sweeper_reaps" not in rules:
        return  # nobody is left who would
    for inc in (s.listed if cfg.scaled or cfg.alive else {e[1] for e in s.infl}) - s.lb - {SQS}:
        mine = [e for e in s.infl if e[1] == inc]
        reaped = s.reaped
        if cfg.counting and "reap_counts" in rules:
            for e in mine:
                reaped = put(reaped, e[2][0], min(reaped[e[2][0]] + 1, cfg.limit))
        back = enqueue(s.queue, *(e[2] for e in mine))
        after = s._replace(infl=s.infl - set(mine), queue=back, reaped=reaped)
        yield f"REAP inc{inc}", True, after._replace(listed=s.listed - {inc})
