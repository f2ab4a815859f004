"""The outbox: rows that scripts on records write, deliverers that may be killed between any two calls, and a receiver.

One destination: others have rows, and a schedule, of their own. A row is given up after two tries.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model.scripts import FINAL, Rules
from tests.protocol.model.state import NOBODY, Cfg, Post, Row, State, fresh, put, spend

Step = tuple[str, bool, State]  # label, fair?, the world after it

TRIES = 2


def outbox_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    for k, p in enumerate(s.posts):
        if p.pc == "idle":
            yield from _take(s, k, rules)
            continue
        yield from _send(s, k) if p.pc == "send" else _tell(s, k, rules)
        if b := spend(s, "dcrash"):
            yield f"deliverer {k} is killed", False, s._replace(posts=put(s.posts, k, NOBODY), budget=b)
    for t, rows in enumerate(s.rows):
        for i, row in enumerate(rows):
            yield from _around(s, t, i, row, rules)


def _take(s: State, k: int, rules: Rules) -> Iterator[Step]:
    early = "deliver_first" not in rules
    holder = fresh({row.holder for rows in s.rows for row in rows} | {p.holder for p in s.posts})
    for t, rows in enumerate(s.rows):
        for i, row in enumerate(rows):
            if row.state != "due" or row.held:
                continue
            taken = _set(s, t, i, row._replace(holder=holder, held=True))
            at = Post("tell" if early else "send", (t, row.event), holder, early)
            yield f"deliverer {k} TAKE {row.event}", True, taken._replace(posts=put(s.posts, k, at))
            if lost := spend(s, "lost"):
                yield f"deliverer {k} TAKE {row.event}, reply lost", False, taken._replace(budget=lost)


def _send(s: State, k: int) -> Iterator[Step]:
    """The receiver gets it and says so; or it does not; or it does, and its answer is lost."""
    p = s.posts[k]
    t, i = _find(s, p)
    got = _set(s, t, i, s.rows[t][i]._replace(got=True)) if i >= 0 else s
    over = NOBODY if p.ok else p._replace(pc="tell", ok=True)  # told before it was sent, where that is allowed
    yield f"deliverer {k} is answered 200", True, got._replace(posts=put(s.posts, k, over))
    if b := spend(s, "refuse"):
        failed = put(s.posts, k, p._replace(pc="tell", ok=False))
        yield f"deliverer {k} is refused", False, s._replace(posts=failed, budget=b)
        yield f"deliverer {k} hears no answer", False, got._replace(posts=failed, budget=b)


def _tell(s: State, k: int, rules: Rules) -> Iterator[Step]:
    """DELIVERED, RETRY or DEAD."""
    p = s.posts[k]
    t, i = _find(s, p)
    row = s.rows[t][i] if i >= 0 else None
    what = "DELIVERED" if p.ok else "RETRY" if row and row.tries + 1 < TRIES else "DEAD"
    after, said = s, 0
    if row and row.state == "due" and (row.holder == p.holder or "row_holder" not in rules):
        said = 1
        tries = row.tries + 1
        if what == "RETRY":
            after = _set(s, t, i, row._replace(tries=tries, holder=None, held=False))
        elif what == "DEAD" and "dead_kept" not in rules:
            after = s._replace(rows=put(s.rows, t, s.rows[t][:i] + s.rows[t][i + 1 :]))
        else:
            after = _set(s, t, i, row._replace(tries=tries, state=what.lower()))
    elif row and row.held and row.holder == p.holder and row.state != what.lower():
        after = _set(s, t, i, row._replace(overruled=True))
    label = f"deliverer {k} {what} -> {said}"
    over = NOBODY if "deliver_first" in rules or not p.ok else p._replace(pc="send")
    yield label, True, after._replace(posts=put(s.posts, k, over))
    if lost := spend(s, "lost"):
        yield f"{label}, reply lost", False, after._replace(budget=lost)


def _around(s: State, t: int, i: int, row: Row, rules: Rules) -> Iterator[Step]:
    """Leases that end, the sweeper, operators, and a failover that loses what became of a row, and keeps its final."""
    lives = any(p.holder == row.holder for p in s.posts)
    b = spend(s, "stall") if lives else s.budget
    if row.held and row.state == "due" and b is not None and "row_lease" in rules:
        yield (
            f"the lease of row {row.event} ends",
            not lives,
            _set(s, t, i, row._replace(held=False))._replace(budget=b),
        )
    free = not row.held or "untaken_free" not in rules
    if row.state == "due" and free and (b := spend(s, "untaken")):
        yield f"UNTAKEN {row.event}", False, _set(s, t, i, row._replace(state="dead"))._replace(budget=b)
    if row.state != "due" and (b := spend(s, "replay")):
        yield f"REPLAY {row.event}", False, _set(s, t, i, Row(row.event))._replace(budget=b)
    if row != Row(row.event) and (b := spend(s, "unmark")):
        again = Row(row.event, got=row.got)
        yield f"a failover drops what became of row {row.event}", False, _set(s, t, i, again)._replace(budget=b)


def _find(s: State, p: Post) -> tuple[int, int]:
    """The place of a deliverer's row; -1 where a failover has lost it."""
    t, event = p.row
    return t, next((i for i, row in enumerate(s.rows[t]) if row.event == event), -1)


def _set(s: State, t: int, i: int, row: Row) -> State:
    return s._replace(rows=put(s.rows, t, put(s.rows[t], i, row)))


def wrong_rows(s: State) -> str:
    """The invariant that rows break, in words. In these worlds each task asks for all events."""
    for t, rows in enumerate(s.rows):
        r, final = s.recs[t], s.ghosts[t].final
        if s.ghosts[t].erased:
            if rows:
                return "S25 a deleted task left a row"
            continue
        events = [row.event for row in rows]
        if len(events) != len(set(events)):
            return "S17 an event was written twice"
        if final and final not in events:
            return "S17 a final record without its row"
        if any(event in FINAL and event != final for event in events):
            return "S17 a row without its final"
        if r and (r.claims > 0) != ("in_progress" in events):
            return "S17 a task that was taken up without its row, or a row of one that was not"
        if any(row.state == "delivered" and not row.got for row in rows):
            return "S18 a row is marked as delivered, and its receiver never got it"
        if any(row.overruled for row in rows):
            return "S18 a deliverer whose lease stands was overruled"
    return ""


def rows_in_order(s: State) -> State:
    """The smallest names for holders, and deliverers that are alike in order. Holders that are gone are all alike."""

    def stands(p: Post) -> tuple[object, ...]:
        i = _find(s, p)[1] if p.row else -1
        return (p.pc, p.row or (), p.ok, i >= 0 and s.rows[p.row[0]][i].holder == p.holder)

    posts = sorted(s.posts, key=stands)
    name = {p.holder: k for k, p in enumerate(posts, 1) if p.holder is not None} | {None: None}
    rows = tuple(
        tuple(row._replace(holder=name.get(row.holder, 0 if row.held else None)) for row in mine) for mine in s.rows
    )
    return s._replace(posts=tuple(p._replace(holder=name[p.holder]) for p in posts), rows=rows)
