"""One worker slot: FETCH, CLAIM, APPEND ..., FINISH, tracer, SETTLE, ACK, and every way out of that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.protocol.model import scripts
from tests.protocol.model.rules import ALL
from tests.protocol.model.scripts import FINAL, Rec, Rules, able, level_of
from tests.protocol.model.state import (
    FAULT,
    IDLE,
    SQS,
    Cfg,
    Row,
    Slot,
    State,
    enqueue,
    fresh,
    held_back,
    is_suspect,
    message,
    order,
    put,
    queued_record,
    served_by,
    serving,
    toxic,
    without,
)

Step = tuple[str, Slot, State]  # label, the slot after it, the world after it (without that slot)


def store(s: State, t: int, r: Rec | None) -> State:
    """The record after a script, with its publications and the checker's memory of first finals."""
    old, g = s.recs[t], s.ghosts[t]
    if r is old:
        return s
    if r is not None:
        if old is None and g.final and not g.bad:
            g = g._replace(bad="S2 a finished task's record was made again")
        if r.status in FINAL and g.final is None:
            g = g._replace(final=r.status)
    reader = heard(s, r) if t == 0 and s.reader else s.reader
    told = r.told[len(old.told) if old else 0 :] if r and s.rows else ()
    rows = put(s.rows, t, s.rows[t] + tuple(map(Row, told))) if told else s.rows
    return s._replace(recs=put(s.recs, t, r), ghosts=put(s.ghosts, t, g), reader=reader, rows=rows)


def heard(s: State, r: Rec | None, *, by_old: bool = False) -> Any:
    """Task 0's reader once its record is this. `by_old`: who made it so knows the task's own channel alone."""
    old, (pc, messages, seen, ended, hears) = s.recs[0], s.reader
    if r is None or old is None or pc == "new":
        return s.reader
    news: tuple[tuple[str, int, object], ...] = ()
    if len(r.stream) > len(old.stream):
        news += (("tok", len(old.stream), r.stream[-1]),)
    if r.end and not old.end:
        news += (("end", len(r.stream), None),)
    by_process = "entered" in hears and not by_old
    if old.claim is not None and r.claim is None and not r.end and by_process:
        news += (("released", len(r.stream), None),)
    if not news:
        return s.reader
    if pc == "cut":  # whoever publishes on a channel that nobody listens to forgets it
        return pc, messages, seen, ended, hears - {"entered"} if by_process else hears
    if not by_process and "own" not in hears:
        return pc, messages, seen, ended, hears | {"late"} if r.deaths else hears
    return pc, messages + tuple((*message, by_process) for message in news), seen, ended, hears


def haunt(s: State, t: int, **changes: Any) -> State:
    return s._replace(ghosts=put(s.ghosts, t, s.ghosts[t]._replace(**changes)))


def indexed(s: State, t: int) -> State:
    """The index of SQS has what is about to be sent."""
    return s._replace(index=frozenset(one for one in s.index if one[0] != t) | {(t, "true")})


def sent(s: State, cfg: Cfg, t: int) -> State:
    """The task's message is sent; on SQS, entered in the index."""
    after = indexed(s, t) if cfg.books else s
    return after._replace(queue=enqueue(s.queue, message(s, cfg, t)))


def take_back(s: State, cfg: Cfg, p: Slot, rules: Rules, keep: bool) -> list[State]:
    """ACK and BACK by delivery. On SQS a stale handle may or may not delete the message."""
    hit = [e for e in s.infl if (e[0] == p.d if "ack_uuid" in rules or cfg.sqs else e[2] == p.msg)][:1]
    if not hit:
        outs = [s]
    else:
        after = s._replace(infl=s.infl - {hit[0]})
        if keep:
            m = hit[0][2] if p.pc != "move" else (*hit[0][2][:2], p.note)
            after = after._replace(queue=enqueue(s.queue, m))
        else:
            after = after._replace(reaped=put(s.reaped, p.msg[0], 0))
            if p.note in ("dead", "buried") and "ack_reason" in rules:
                after = after._replace(dead=s.dead | {p.msg[0]})
        outs = [after]
    if cfg.sqs and not hit and not keep:
        gone = frozenset(e for e in s.infl if e[2] != p.msg)
        outs.append(s._replace(infl=gone, queue=tuple(m for m in s.queue if m != p.msg)))
    return outs


def slot_steps(s: State, i: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """The steps that slot i may take; the caller adds, to each, the variant whose reply is lost."""
    p, inc = s.slots[i], s.incs[cfg.workers[i]]
    if p.pc in ("idle", "refetch"):
        yield from _fetch(s, p, inc, cfg, rules)
    elif toxic(s, cfg, p):
        return  # its only step is its worker's death
    elif p.pc == "popped":
        yield "enter in flight", p._replace(pc="got"), s._replace(infl=s.infl | {(p.d, inc, p.msg)})
    elif p.pc == "got":
        yield from _claim(s, p, inc, cfg, rules)
    else:
        r = s.recs[p.msg[0]]
        if p.pc in ("score", "run") and r and r.expired:
            yield "ends it at its deadline", p._replace(pc="late", note=p.note if p.pc == "run" else "unscored"), s
        yield from _go_on(s, p, i, cfg, rules)


def _survived(s: State, p: Slot, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Whenever it comes, and if it comes at all."""
    t = p.msg[0]
    if cfg.counting and s.reaped[t] and (s.ghosts[t].idle == 0 or "survived_got_on" not in rules):
        yield f"forget the returns of task {t}", p, s._replace(reaped=put(s.reaped, t, 0))


def _go_on(s: State, p: Slot, i: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    if p.pc in ("score", "run"):
        yield from _survived(s, p, cfg, rules)
    if p.pc == "score":
        yield _prompt(s, p, cfg, rules)
    elif p.pc == "run" and len(p.prefix) < cfg.length:
        yield _append(s, p, i, cfg, rules)
    elif p.pc in ("run", "fin", "late"):
        yield _finish(s, p, i, cfg, rules, "incomplete" if p.pc == "late" else "completed")
    else:
        yield from _put_down(s, p, cfg, rules)


def _fetch(s: State, p: Slot, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    again = p.pc == "refetch"
    mine = (q for q, w in zip(s.slots, cfg.workers, strict=True) if s.incs[w] == inc)
    owes = any(w[0] == inc and w[2] == "owes" for w in s.watch)
    if "lapse_first" in rules and (owes or any(q.note == "lapsed" for q in mine)):
        return
    if inc not in s.lb and not cfg.sqs:
        if again:
            yield "FETCH again -> lost", IDLE, s
        return
    if not again and inc in held_back(s):
        return
    c = fresh({q.c for q in s.slots} | {r.claim for r in s.recs if r})
    have = [e for e in s.infl if e[0] == p.d] if again else []
    if have:
        t = have[0][2][0]
        yield "FETCH again", Slot("got", have[0][2], p.d, c, (), _told(s, t, cfg, rules)), s
        return
    d = p.d or fresh({e[0] for e in s.infl} | {q.d for q in s.slots})
    kind = dict(s.kinds).get(inc)
    arrived = tuple(m for m in s.queue if served_by(m, kind))
    others = tuple(m for m in s.queue if not served_by(m, kind))
    waiting = enqueue(tuple(m for m in s.sorted if served_by(m, kind)), *arrived)
    if cfg.scaled and arrived:
        yield "FETCH only sorts", p, s._replace(queue=others, sorted=enqueue(s.sorted, *arrived))
    holds_suspect = "suspect_alone" in rules and any(e[1] == inc and is_suspect(s, cfg, e[2][0]) for e in s.infl)
    for m in sorted(set(waiting), key=order):
        if holds_suspect and is_suspect(s, cfg, m[0]):
            continue
        if cfg.scaled:
            left = s._replace(queue=others, sorted=without(enqueue(s.sorted, *arrived), m))
        else:
            left = s._replace(queue=without(s.queue, m))
        if "fetch_atomic" not in rules:
            yield f"pop task {m[0]}", Slot("popped", m, d, c), left
        else:
            got = left._replace(infl=s.infl | {(d, SQS if cfg.sqs else inc, m)})
            yield f"FETCH task {m[0]}", Slot("got", m, d, c, (), _told(s, m[0], cfg, rules)), got
    if again and not waiting:
        yield "FETCH again: empty", IDLE, s


def _told(s: State, t: int, cfg: Cfg, rules: Rules) -> str:
    return "condemned" if cfg.counting and s.reaped[t] >= cfg.limit and "condemned_first" in rules else ""


def _claim(s: State, p: Slot, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    t = p.msg[0]
    r = s.recs[t]
    made = queued_record(cfg) if cfg.plain else None
    kind, lives = dict(s.kinds).get(inc), serving(s, s.ls - held_back(s))
    if inc in {s.incs[w] for w in cfg.old}:  # a release that knows no levels
        rules = rules - {"claim_level"}
    answer, r2 = scripts.claim(
        r,
        p.c,
        inc,
        s.ls,
        rules,
        limit=cfg.limit,
        made=made,
        condemned=p.note == "condemned",
        kind=kind,
        serving=lives,
        erased=t in s.erased,
        revoked=t in s.revoked,
    )
    s2 = store(s, t, r2)
    if answer == "elsewhere":
        home = r and scripts.elsewhere(r, kind, lives, rules, bound=made is None)
        home = home or (kind[0], None, cfg.need)  # type: ignore[index]
        yield f"CLAIM -> elsewhere {home}", p._replace(pc="move", note=home), s2
        return
    if answer == "go" and r and r.claim != p.c and scripts.elsewhere(r, kind, lives, ALL, bound=made is None):
        s2 = haunt(
            s2, t, bad="S16 a task went on below its level, or in another version or pool than its own, which lives"
        )
    if answer == "go" and r is None and cfg.need > level_of(kind) and able((0, None), cfg.need, lives):
        s2 = haunt(s2, t, bad="S26 a task was taken up by a release that cannot do it, while another lives")
    if answer == "busy" and r and (r.owner, "", "taken") in s.alive:
        s2 = haunt(s2, t, bad="S23 what was returned early is refused: its owner's lease stands on the store")
    if (
        answer in ("go", "settle")
        and r2
        and r2.claim == p.c
        and (r is None or r.claim != p.c)
        and not (r and r.status in FINAL)
    ):
        s2 = haunt(s2, t, excused=inc not in s.ls, idle=s.ghosts[t].idle + (answer == "go"))
    back = "back" if "not_busy_back" in rules else "hold"
    scored = bool(r2 and r2.prompt)
    pc = {
        "go": "score" if cfg.prompt and not scored else "run",
        "settle": "trace",
        "done": "again" if may_lose_results(cfg) and "again_stored" in rules else "ack",
        "erased": "forget" if "erase_result" in rules else "ack",
        # an earlier call, whose reply was lost, may have taken it
        "lost": "release_back" if "lapse_release" in rules else back,
        "busy": back if "busy_no_ack" in rules else "ack",
    }[answer]
    given_up = r2 and (r2.letter if answer == "done" else answer == "settle" and r2.why == "dead")
    note = "dead" if given_up else "taken" if answer == "go" and scored else ""
    if cfg.broken and answer in ("go", "settle"):
        pc, note = "release_ack" if "bury_release" in rules else "ack", "buried"
    yield f"CLAIM -> {answer}", p._replace(pc=pc, prefix=r2.stream if answer == "go" and r2 else (), note=note), s2


def _prompt(s: State, p: Slot, cfg: Cfg, rules: Rules) -> Step:
    t = p.msg[0]
    r = s.recs[t]
    answer, r2 = scripts.prompt(r, p.c, 1, rules)
    s2 = store(s, t, r2)
    if r2 is not r:
        s2 = haunt(s2, t, idle=0)
    if r and r2 is not r and r.end and not s.ghosts[t].bad:
        s2 = haunt(s2, t, bad="S6 the prompt's entry after the terminal entry")
    after = {
        "ok": p._replace(pc="run"),
        "gone": _no_record(p, cfg, rules),
        "other": p._replace(pc="back" if "not_busy_back" in rules else "hold"),
        "cancel": p._replace(pc="fin"),
    }[answer]
    return f"PROMPT -> {answer}", after, s2


def _no_record(p: Slot, cfg: Cfg, rules: Rules) -> Slot:
    """Nobody needs a client's message any more; of a plain one CLAIM makes the record again."""
    return p._replace(pc="release_back" if cfg.plain and "plain_again" in rules else "ack", note="")


def _again(p: Slot, r: Rec | None, at: int, cfg: Cfg) -> Slot:
    """A failover lost the tail: from there once more, the prompt's entry first, if it is gone and was made here."""
    if cfg.prompt and r and not r.prompt:
        return p._replace(pc="release_back" if p.note == "taken" else "score", prefix=p.prefix[:at])
    return p._replace(pc="run", prefix=p.prefix[:at])


def _append(s: State, p: Slot, i: int, cfg: Cfg, rules: Rules) -> Step:
    t, n = p.msg[0], len(p.prefix)
    r, token = s.recs[t], i if cfg.differ else n
    answer, at, r2 = scripts.append(r, p.c, 0, n, (token,), rules, scored=cfg.prompt)
    s2 = store(s, t, r2)
    if r2 is not r:
        s2 = haunt(s2, t, idle=0)
    if r and r2 is not r and not s.ghosts[t].bad:
        if r.end or r.status in FINAL:
            s2 = haunt(s2, t, bad="S6 token after the terminal entry")
        elif r.stream != p.prefix:
            s2 = haunt(s2, t, bad="S1 token on top of a text its author never saw")
        elif r.at != "stream":
            s2 = haunt(s2, t, bad="S1 token in a stream that was compacted: its position is another's")
    after = {
        "ok": p._replace(prefix=(*p.prefix, token)),
        "resend": _again(p, r, at, cfg),
        "gone": _no_record(p, cfg, rules),
        "other": p._replace(pc="back" if "not_busy_back" in rules else "hold"),
        "cancel": p._replace(pc="fin"),
    }[answer]
    return f"APPEND {n} -> {answer}", after, s2


def _finish(s: State, p: Slot, i: int, cfg: Cfg, rules: Rules, status: str) -> Step:
    t = p.msg[0]
    settles = (cfg.native and cfg.workers[i] not in cfg.old) or "tracer_unless_native" not in rules
    r, g = s.recs[t], s.ghosts[t]
    if "tracer_after" not in rules and p.pc == "run":
        return "tracer", p._replace(pc="fin"), haunt(s, t, links=min(g.links + 1, 2))
    if "end_in_script" not in rules and r and r.claim == p.c and not r.end:
        return "APPEND terminal entry", p, store(s, t, r._replace(end="completed"))
    scored = cfg.prompt and p.note != "unscored"
    answer, r2 = scripts.finish(r, p.c, (len(p.prefix),), rules, status, scored=scored, settles=settles)
    after = {
        "won": p._replace(pc="ack" if settles else "trace" if "tracer_after" in rules else "settle"),
        "gone": _no_record(p, cfg, rules),
        "other": p._replace(pc="back" if "not_busy_back" in rules else "hold"),
        "resend": _again(p, r, len(r.stream) if r else 0, cfg),
    }[answer]
    return f"FINISH {status} -> {answer}", after, store(s, t, r2)


def _put_down(s: State, p: Slot, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    t = p.msg[0]
    r = s.recs[t]
    if p.pc == "trace":
        after = s._replace(results=s.results | {t}) if may_lose_results(cfg) else s
        yield "tracer: result, links", p._replace(pc="settle"), haunt(after, t, links=min(s.ghosts[t].links + 1, 2))
    elif p.pc == "again":
        yield "stores the result again", p._replace(pc="settle"), s._replace(results=s.results | {t})
    elif p.pc == "forget":
        yield "removes the result", p._replace(pc="ack"), s._replace(results=s.results - {t})
    elif p.pc == "settle":
        letter = p.note == "dead" and "letter_noted" in rules
        settled, r2 = scripts.settle(r, letter=letter, erased=t in s.erased)
        pc = "ack" if settled > 0 or "settle_answer" not in rules else "release_back"
        pc = "forget" if settled == -2 else pc
        yield (
            f"SETTLE -> {settled}",
            _no_record(p, cfg, rules) if settled == -1 else p._replace(pc=pc),
            store(s, t, r2),
        )
    elif p.pc in ("release_back", "release_ack"):
        buried = p.note == "buried"
        note = "released" if p.pc == "release_ack" and not buried else p.note
        after = store(s, t, scripts.release(r, p.c, rules, buried=buried)[1])
        if buried and after is not s:  # the tracer ran before it
            after = haunt(after, t, links=min(s.ghosts[t].links + 1, 2))
        yield "RELEASE", p._replace(pc=p.pc[8:], note=note), after
    elif p.pc == "release_end":
        yield "RELEASE", IDLE, store(s, t, scripts.release(r, p.c, rules)[1])
    elif p.pc == "retry_pub":
        pc = "release_ack" if "retry_order" in rules else "release_end"
        yield "publish retry copy", p._replace(pc=pc), sent(s, cfg, t)
    elif p.pc == "retry_ack":  # the wrong order: ACK, then publish
        for after in take_back(s, cfg, p, rules, False):
            yield "ACK", p._replace(pc="retry_pub"), after
    elif p.pc == "ack" and "ack_settled" in rules and _unsettled(s, p, cfg):
        yield "ACK -> not settled", p._replace(pc="release_back"), s
    elif p.pc in ("ack", "back", "move"):
        for after in take_back(s, cfg, p, rules, p.pc != "ack"):
            yield p.pc.upper(), IDLE, after
    elif p.pc == "hold":
        yield "keeps the delivery, does nothing", IDLE, s


def may_lose_results(cfg: Cfg) -> bool:
    """Elsewhere nobody asks what Celery has."""
    return cfg.plain and (cfg.budget[FAULT["delete"]] > 0 or cfg.budget[FAULT["again"]] > 0)


def _unsettled(s: State, p: Slot, cfg: Cfg) -> bool:
    """Of a task that its worker settled, as ACK sees it: SQS knows nothing of records."""
    r = s.recs[p.msg[0]]
    return not cfg.sqs and p.note not in ("released", "buried") and r is not None and not r.settled
