"""Everything around the workers: producers, the sweeper, clients that cancel, clocks, and the store's faults."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model import scripts
from tests.protocol.model.scripts import FINAL, Rules
from tests.protocol.model.state import Cfg, State, enqueue, message, put, queued_record, spend, without
from tests.protocol.model.worker import haunt, indexed, sent, store

Step = tuple[str, bool, State]  # label, fair?, the world after it


def producer_steps(s: State, p: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Producer p: ADMIT, send, QUEUED; a plain Celery sender only sends."""
    pc, t, lost = s.prods[p], p % cfg.tasks, spend(s, "lost")
    if pc == "admit":
        answer, r = scripts.admit(s.recs[t], p, False, rules, erased=t in s.erased)
        s2, to = store(s, t, r), "done"
        if answer != "exists":
            s2, to = haunt(s2, t, accepted=True), "index" if cfg.books and "index_first" in rules else "send"
            if r and r.nonce != p:
                s2 = haunt(s2, t, bad="S8 a request was accepted, and another's task stands in its place")
        yield f"producer {p} ADMIT {t} -> {answer}", True, s2._replace(prods=put(s.prods, p, to))
        if lost:
            yield f"producer {p} ADMIT {t}, reply lost", False, s2._replace(budget=lost)
    elif pc in ("index", "late_index"):
        to = "send" if pc == "index" else "mark"
        yield f"producer {p} enters {t} in the index", True, indexed(s, t)._replace(prods=put(s.prods, p, to))
    elif pc == "send":
        s2 = haunt(s._replace(queue=enqueue(s.queue, message(s, cfg, t))), t, accepted=True)
        to = "done" if cfg.plain else "late_index" if cfg.books and "index_first" not in rules else "mark"
        yield f"producer {p} sends {t}", True, s2._replace(prods=put(s.prods, p, to))
        if lost:
            yield f"producer {p} sends {t}, reply lost", False, s2._replace(budget=lost)
    elif pc == "mark":
        s2 = store(s, t, scripts.queued(s.recs[t], rules)[1])
        yield f"producer {p} QUEUED {t}", True, s2._replace(prods=put(s.prods, p, "done"))
    if pc in ("index", "send", "mark") and not cfg.plain and (b := spend(s, "pcrash")):
        yield f"producer {p} crashes", False, s._replace(prods=put(s.prods, p, "done"), budget=b)


def sweeper_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """It reads its index, re-sends what is still `submitting`, and marks it."""
    if s.sweep is None:
        for t, r in enumerate(s.recs):
            if r and r.listed and r.status == "submitting" and "sweeper" in rules:
                yield f"sweeper sees task {t}", True, s._replace(sweep=("send", t))
        return
    what, t = s.sweep
    if what == "send":
        yield "sweeper sends", True, sent(s, cfg, t)._replace(sweep=("mark", t))
    else:
        yield "sweeper QUEUED", True, store(s, t, scripts.queued(s.recs[t], rules)[1])._replace(sweep=None)
    if b := spend(s, "pcrash"):
        yield "sweeper crashes", False, s._replace(sweep=None, budget=b)


def orphan_steps(s: State, t: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """The sweeper settles what is final and nobody's. It has looked for the message wherever it may be (on one server,
    at one instant), where the task needs it."""
    r = s.recs[t]
    if not cfg.orphan or "orphan_sweeper" not in rules or r is None:
        return
    nowhere = not any(m[0] == t for m in (*s.queue, *s.sorted, *(e[2] for e in s.infl)))
    said, after = scripts.orphan(r, s.ls, rules, needs=cfg.plain or r.why == "dead", gone=nowhere)
    if after is not r:
        spared = nowhere or not cfg.plain
        s2 = haunt(store(s, t, after), t, spared=spared)
        yield f"ORPHAN {t} -> {said}", True, s2


def compact_steps(s: State, t: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """What it has read of the stream may be old by now; it reads again then."""
    r = s.recs[t]
    if not cfg.compact or r is None:
        return
    if r.at == "nowhere":  # unless its writer is killed now
        yield "the result is written", False, store(s, t, r._replace(at="result"))
        return
    for entries in {r.length + (r.end is not None), max(0, r.length - 1)}:
        said, after = scripts.compact(r, entries, rules)
        if after is not r:
            yield f"COMPACT {t} -> {said}", False, store(s, t, after)


def expiry_steps(s: State, t: int, rules: Rules) -> Iterator[Step]:
    """Whoever sweeps ends what is too late, or cancelled, and nobody's."""
    before = s.recs[t]
    status, r = scripts.expire(before, s.ls, rules)
    if r is not before:
        yield f"EXPIRE {t} -> {status}", True, store(s, t, r)
    elif r and r.cancel and r.status not in (*FINAL, "submitting") and r.owner not in s.ls:
        yield (
            f"no worker comes for {t}",
            False,
            haunt(s, t, bad="S14 a cancelled task that nobody has waits for a worker"),
        )


def client_steps(s: State, t: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    r, b = s.recs[t], spend(s, "cancel")
    if b and r and r.status not in FINAL:
        accepted, status, r2 = scripts.cancel(r, s.ls, rules)
        s2 = store(s, t, r2)
        yield f"CANCEL {t} -> {status}", False, haunt(s2, t, cancelled=accepted)._replace(budget=b)
    if b := spend(s, "revoke"):
        said, r2 = scripts.revoke(r, s.ls, rules)
        s2 = store(s, t, r2)
        if said == "noted":
            s2 = s2._replace(revoked=s.revoked | {t})
        g = s.ghosts[t]
        told = said == "noted" and g.final is None and not g.erased
        if r and r.owner in s.ls and r2 is not r:
            s2 = haunt(s2, t, bad="S27 a revocation took a task from a live worker, which may go on with it")
        accepted = told or (r2 is not r and r2 is not None and r2.cancel)
        yield f"REVOKE {t} -> {said}", False, haunt(s2, t, cancelled=g.cancelled or accepted)._replace(budget=b)
    if (b := spend(s, "again")) and t in s.results:
        s2 = haunt(s._replace(queue=enqueue(s.queue, message(s, cfg, t))), t, again=True)
        yield f"{t} is forgotten and sent again", False, s2._replace(results=s.results - {t}, budget=b)
    if (b := spend(s, "delete")) and r and "admit" not in s.prods:
        status, last = scripts.delete(r, rules)
        s2 = haunt(store(s, t, last), t, spared=True, erased=True)  # its links are not sent any more
        if s.rows and "delete_rows" in rules:
            s2 = s2._replace(rows=put(s2.rows, t, ()))
        s2 = s2._replace(recs=put(s2.recs, t, None), erased=s.erased | {t}, results=s.results - {t}, budget=b)
        yield f"DELETE {t}, {status} before", False, s2


def fault_steps(s: State, t: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Clock, TTL, duplicates, and a failover that drops a stream's tail (with the counter: one script, one write)."""
    r = s.recs[t]
    if (b := spend(s, "deadline")) and r and not r.expired and r.status not in FINAL:
        yield f"deadline of {t} passes", False, store(s, t, r._replace(expired=True))._replace(budget=b)
    if (b := spend(s, "ttl")) and r and _may_expire(s, t, cfg, rules):
        rows = s.rows if "row_outlives" in rules or not s.rows else put(s.rows, t, ())
        yield f"record {t} expires", False, store(s, t, None)._replace(budget=b, rows=rows)
    if (b := spend(s, "dup")) and any(m[0] == t for m in s.queue):
        yield f"message {t} is duplicated", False, s._replace(queue=enqueue(s.queue, message(s, cfg, t)), budget=b)
    if (b := spend(s, "gone")) and r and r.status in FINAL and not r.settled:
        for m in {m for m in s.queue if m[0] == t}:
            after = haunt(s, t, unlisted=r.why == "dead")
            yield f"the broker loses message {t}", False, after._replace(queue=without(s.queue, m), budget=b)
    if (b := spend(s, "tail")) and r and (r.stream or r.prompt) and r.status not in FINAL:
        cut = r._replace(stream=r.stream[:-1], next=(len(r.stream) - 1,)) if r.stream else r._replace(prompt=())
        yield f"failover drops the last entry of {t}", False, s._replace(recs=put(s.recs, t, cut), budget=b)
    held = [e[2] for e in s.infl]
    if cfg.books:  # one server: what was written to the books since would be lost, too
        held = [f.msg for f in s.fields] if all(f.what == "given" for f in s.fields) else []
    undone = r and r.status in FINAL and any(m[0] == t for m in held) and not (s.reap or (cfg.plain and r.settled))
    if (b := spend(s, "undo")) and undone:
        ghost = s.ghosts[t]._replace(final=None, links=0, excused=True, undone=True)
        before = None if cfg.plain else queued_record(cfg)
        back = s._replace(recs=put(s.recs, t, before), ghosts=put(s.ghosts, t, ghost), budget=b)
        if s.rows and "row_same_store" in rules:
            back = back._replace(rows=put(s.rows, t, ()))
        yield f"failover drops all that became of {t}", False, back


def _may_expire(s: State, t: int, cfg: Cfg, rules: Rules) -> bool:
    r = s.recs[t]
    if not r or not (r.settled or ("ttl_settled" not in rules and r.status in FINAL)):
        return False
    if s.reader and not s.reader[3]:
        return False
    if "submit_window" in rules:  # whoever still submits does so long before any TTL has run
        early = ("admit", "send") if cfg.plain else ("admit",)
        if any(pc in early for p, pc in enumerate(s.prods) if p % cfg.tasks == t):
            return False
    return not (cfg.plain and any(m[0] == t for m in (*s.queue, *(e[2] for e in s.infl))))
