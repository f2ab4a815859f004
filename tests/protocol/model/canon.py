"""The canonical form of a world: what has the same future is one state.

forget what no step reads -> put workers that are alike in order -> the smallest identifiers
"""

from __future__ import annotations

from typing import Any

from tests.protocol.model.alive import known as known_alive
from tests.protocol.model.outbox import rows_in_order
from tests.protocol.model.scripts import Rec
from tests.protocol.model.state import DOWN, IDLE, SQS, Cfg, Slot, State

KEEPS_PREFIX = ("got", "score", "run", "fin", "late", "popped")
KEEPS_CLAIM = ("release_back", "release_ack", "release_end", "retry_pub", "retry_ack")


def _slot(p: Slot, strays: bool) -> Slot:
    """Who looks for strays may RELEASE by any slot's claim."""
    if p.pc == "idle":
        return IDLE
    c = p.c if p.pc in KEEPS_CLAIM or strays else None
    if p.pc in KEEPS_PREFIX or (c == p.c and not p.prefix):
        return p
    return p._replace(c=c, prefix=())


def canon(s: State, cfg: Cfg) -> State:
    """Rename identifiers by where they stand, forget what no step reads, and put workers that are alike in order."""
    s = s._replace(slots=tuple([_slot(p, cfg.strays) for p in s.slots]))
    s = rows_in_order(s) if s.posts else s
    s = known_alive(s) if cfg.alive else s
    return renamed(in_order(s, cfg) if len(s.slots) > 1 and not (cfg.kinds or cfg.old or cfg.uncounted) else s, cfg)


def renamed(s: State, cfg: Cfg) -> State:
    """With the smallest identifiers, by where they stand."""
    slots = s.slots
    inc: dict[Any, Any] = {None: None, SQS: SQS, **{n: i + 1 for i, n in enumerate(s.incs) if n != DOWN}}
    kinds = dict(s.kinds)
    owners = [r.owner if r else None for r in s.recs]
    entries = s.fields | (frozenset(s.reap[1]) if s.reap else frozenset())
    known = (
        s.lb
        | s.ls
        | s.listed
        | {f[0] for f in s.alive}
        | {w[1] for w in s.watch}
        | {one for _, one, _ in s.since}
        | {e[1] for e in s.infl}
        | {f.inc for f in entries}
        | set(owners)
    )
    strangers = (known | ({s.reap[0]} if s.reap else set())) - set(inc)
    if len(strangers) > 1:
        held: dict[Any, list[Any]] = {
            n: [*sorted(e[2] for e in s.infl if e[1] == n), *sorted(f[2:] for f in entries if f.inc == n)]
            for n in strangers
        }
        ordered = sorted(
            strangers,
            key=lambda n: (
                n in s.lb,
                n in s.ls,
                n in s.listed,
                [o == n for o in owners],
                held[n],
                kinds.get(n, ()),
                _facts(s, n),
            ),
        )
    else:
        ordered = list(strangers)
    for n in ordered:
        inc[n] = len(inc) + len(s.incs)
    inc[DOWN] = DOWN
    d: dict[Any, Any] = {None: None}
    c: dict[Any, Any] = {None: None}
    for p in slots:
        d.setdefault(p.d, len(d))
        c.setdefault(p.c, len(c))
    for e in sorted(s.infl, key=lambda e: (inc[e[1]], e[2])):
        d.setdefault(e[0], len(d))
    for f in sorted(entries, key=lambda f: (inc[f.inc], f.msg, f.what)):
        d.setdefault(f.d, len(d))
    for r in s.recs:
        if r:
            c.setdefault(r.claim, len(c))
    return s._replace(
        slots=tuple(p if p is IDLE or (d[p.d] == p.d and c[p.c] == p.c) else _renamed(p, d, c) for p in slots),
        incs=tuple(inc[n] for n in s.incs),
        lb=frozenset(inc[n] for n in s.lb),
        ls=frozenset(inc[n] for n in s.ls),
        infl=frozenset((d[e[0]], inc[e[1]], e[2]) for e in s.infl),
        recs=tuple(r and _record(r, c[r.claim], inc[r.owner], inc, cfg) for r in s.recs),
        listed=frozenset(inc[n] for n in s.listed),
        looks=tuple(one._replace(what=_those(one.what, d), seen=_those(one.seen, d)) for one in s.looks),
        kinds=frozenset((inc[n], kind) for n, kind in s.kinds if n in s.lb | s.ls or n in s.incs) if kinds else s.kinds,
        alive=frozenset((inc[n], *rest) for n, *rest in s.alive) if s.alive else s.alive,
        watch=frozenset((inc[n], inc[m], how) for n, m, how in s.watch) if s.watch else s.watch,
        since=frozenset((inc[n], inc[m], x) for n, m, x in s.since) if s.since else s.since,
        unknown=frozenset((d[uuid], c[claim]) for uuid, claim in s.unknown if uuid in d and claim in c),
        fields=frozenset(f._replace(d=d[f.d], inc=inc[f.inc]) for f in s.fields) if s.fields else s.fields,
        reap=s.reap and (inc[s.reap[0]], tuple(sorted(f._replace(d=d[f.d], inc=inc[f.inc]) for f in s.reap[1]))),
        old=s.old & ({*s.queue} | {e[2] for e in s.infl} | {f.msg for f in entries}) if s.old else s.old,
        ghosts=s.ghosts if cfg.counting else tuple(g._replace(idle=0) if g.idle else g for g in s.ghosts),
    )


def in_order(s: State, cfg: Cfg) -> State:
    """The same world with its workers, and the slots of each, in the order of what they are at.

    Which worker is which decides nothing: with the tokens that tell a slot's writing from another's (`differ`) renamed
    alike, every step of the one world is one of the other. Ties stay as they are, so that some worlds that are the same
    are told apart: that costs time alone.
    """
    keys = [_at(s, i, cfg) for i in range(len(s.slots))]
    of: dict[int, list[int]] = {}
    for i, w in enumerate(cfg.workers):
        of.setdefault(w, []).append(i)
    for mine in of.values():
        mine.sort(key=keys.__getitem__)
    rank = {w: _stands(s, s.incs[w], [keys[i] for i in mine]) for w, mine in of.items()}
    # Only workers with as many slots change places.
    workers = sorted(of, key=lambda w: (-len(of[w]), rank[w]))
    slots = [i for w in workers for i in of[w]]
    if slots == list(range(len(slots))):
        return s
    return permuted(s, workers, slots, cfg)


def permuted(s: State, workers: list[int], slots: list[int], cfg: Cfg) -> State:
    """The world with other numbers: worker `workers[k]` is k now, and slot `slots[k]` is k."""
    changed = s._replace(
        slots=tuple([s.slots[i] for i in slots]),
        incs=tuple([s.incs[w] for w in workers]),
        looks=tuple([s.looks[w] for w in workers]) if s.looks else (),
    )
    if not cfg.differ:
        return changed
    token = {i: k for k, i in enumerate(slots)}
    return changed._replace(
        slots=tuple([p._replace(prefix=tuple([token[one] for one in p.prefix])) for p in changed.slots]),
        recs=tuple([r and r._replace(stream=tuple([token[one] for one in r.stream])) for r in s.recs]),
    )


def _at(s: State, i: int, cfg: Cfg) -> tuple[Any, ...]:
    """What tells slot i from others, whatever identifiers are called."""
    p = s.slots[i]
    if p.pc == "idle" and not cfg.differ:
        return ("idle",)
    wrote = [[one == i for one in r.stream] for r in s.recs if r] if cfg.differ else []
    claims = [r is not None and p.c is not None and r.claim == p.c for r in s.recs]
    held = p.d is not None and any(e[0] == p.d for e in s.infl)
    prefix = [one == i for one in p.prefix] if cfg.differ else p.prefix
    return (p.pc, p.msg or (), p.note, claims, held, p.c is not None, prefix, wrote)


def _stands(s: State, inc: int, slots: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What tells a worker from others."""
    owned = [r is not None and r.owner == inc for r in s.recs]
    held = [*sorted(e[2] for e in s.infl if e[1] == inc), *sorted(f[2:] for f in s.fields if f.inc == inc)]
    return (inc == DOWN, inc in s.lb, inc in s.ls, inc in s.listed, owned, held, slots, _facts(s, inc))


def _facts(s: State, inc: int) -> list[tuple[str, ...]]:
    """What is known of its life, and who looks at whom."""
    facts = [fact[1:] for fact in s.alive if fact[0] == inc]
    return sorted(
        [
            *facts,
            *(("looks", how) for n, _, how in s.watch if n == inc),
            *(("seen", how) for _, n, how in s.watch if n == inc),
            *(("judges", x) for n, _, x in s.since if n == inc),
            *(("judged", x) for _, n, x in s.since if n == inc),
        ]
    )


def _those(some: frozenset[int], d: dict[Any, Any]) -> frozenset[int]:
    """What is neither held nor in flight any more never comes again: a UUID is used once."""
    return frozenset(d[uuid] for uuid in some if uuid in d) if some else some


def _renamed(p: Slot, d: dict[Any, Any], c: dict[Any, Any]) -> Slot:
    return p._replace(d=d[p.d], c=c[p.c])


def _record(r: Rec, claim: Any, owner: Any, inc: dict[Any, Any], cfg: Cfg) -> Rec:
    """Most are as they were already, and a new tuple takes long."""
    claims = min(r.claims, 1) if cfg.late else 0
    stuck, mark = (r.stuck, r.mark) if cfg.counting else (0, 0)
    lost = tuple([inc.get(n, 0) for n in r.lost]) if cfg.alive else ()
    if (r.claim, r.owner, r.claims, r.stuck, r.mark, r.lost) == (claim, owner, claims, stuck, mark, lost):
        return r
    return r._replace(claim=claim, owner=owner, claims=claims, stuck=stuck, mark=mark, lost=lost)
