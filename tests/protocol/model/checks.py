"""What must never be seen (`wrong`), and the quiet, good end that every state must be able to reach (`good`)."""

from __future__ import annotations

from tests.protocol.model.alive import outstanding
from tests.protocol.model.books import wrong_books
from tests.protocol.model.outbox import wrong_rows
from tests.protocol.model.scripts import FINAL, Rec
from tests.protocol.model.state import FAULTS, IDLE, NOBODY, Cfg, Ghost, State


def wrong(s: State, cfg: Cfg) -> str:
    """The invariant that this state breaks, in words; empty where none is."""
    used = dict(zip(FAULTS, (had - left for had, left in zip(cfg.budget, s.budget, strict=True)), strict=True))
    # Whoever lives says so before it fetches again: only another process can take its task up before that.
    deaths = used["crash"] + s.kills + (used["expire"] if len(s.incs) > 1 else 0)
    if cfg.alive:
        deaths += outstanding(s)
        if max(s.reaped) > deaths:
            return "S7 a return was counted, and no worker died"
    for t, (r, g) in enumerate(zip(s.recs, s.ghosts, strict=True)):
        if g.bad:
            return g.bad
        if said := _links(r, g):
            return said
        if r is not None and (said := _record(t, r, g, deaths, cfg)):
            return said
    if cfg.killer and s.kills > cfg.killer:
        return f"S7 a message killed more than {cfg.killer} workers"
    if s.reader and s.recs[0] is not None:
        seen, stream = s.reader[2], s.recs[0].stream
        if (seen != stream[: len(seen)] and stream != seen[: len(stream)]) or (s.reader[3] and seen != stream):
            return "S6 reader got another text"
        if cfg.follows and _waits_for_silence(s):
            return "S29 a reader that hears nothing of what was appended waits for silence"
    if cfg.books and (said := wrong_books(s, cfg, used)):
        return said
    return wrong_rows(s) if s.posts else ""


def _waits_for_silence(s: State) -> bool:
    """Whether task 0's reader would learn of what its stream has by silence alone."""
    pc, messages, seen, ended, hears = s.reader
    r = s.recs[0]
    behind = r is not None and (len(r.stream) > len(seen) or r.end)
    return bool(pc == "follow" and behind and not messages and not ended and "late" not in hears)


def _links(r: Rec | None, g: Ghost) -> str:
    if g.links > 1 and not (g.excused or g.undone):
        return "S4 links sent twice, and no owner was lost before SETTLE"
    if g.links and not g.final and not g.undone:
        return "S2 links sent for a task that is not final"
    if g.cancelled and g.final not in (None, "cancelled"):
        return "S3 an accepted cancel did not win"
    if r is None and g.final and not (g.links or g.spared):
        return "S4 the record expired before its links were sent"
    if r is not None and r.settled and not (g.links or g.spared):
        return "S4 settled, and its links were never sent"
    return ""


def _record(t: int, r: Rec, g: Ghost, deaths: int, cfg: Cfg) -> str:
    if g.final and r.status != g.final:
        return f"S2 final {g.final} became {r.status}"
    if cfg.prompt and r.prompt != (0,) and (r.prompt or r.stream or r.status == "completed"):
        return "S1 the prompt's entry does not stand before token 0, once"
    if r.status == "completed" and len(r.stream) != cfg.length:
        return "S1 completed with a wrong text"
    if not cfg.differ and r.stream != tuple(range(len(r.stream))):
        return "S1 stream not contiguous"
    if r.status in FINAL and r.end != r.status:
        return "S6 the terminal entry contradicts the final status"
    if r.status == "in_progress" and not r.dated:
        return "S15 a task runs that was never queued, by its times"
    if r.waits != (r.status in ("submitting", "queued")):
        return "S24 the counts of what waits have a task that does not wait, or lack one that does"
    if r.deaths > deaths:
        return "S7 a death was counted that did not happen"
    if r.why == "dead" and r.claims and cfg.counting and g.idle < cfg.limit:
        return "S10 a task was given up though it had got on"
    if r.status in ("incomplete", "failed") and r.why != "dead" and (r.status == "incomplete") != (r.claims > 0):
        return "S12 past its deadline it failed though it was taken up, or is incomplete though it was not"
    if cfg.killer and t and r.why == "dead":
        return "S9 a task was given up for deaths that another task caused"
    return ""


def good(s: State, cfg: Cfg) -> bool:
    """Quiet, and everything that was accepted is final, settled, its links sent, its dead letter kept."""
    if s.queue or s.sorted or s.infl or s.sweep or any(p != IDLE for p in s.slots) or any(p != "done" for p in s.prods):
        return False
    for t, (r, g) in enumerate(zip(s.recs, s.ghosts, strict=True)):
        if cfg.broken and t not in s.dead:
            return False
        if g.accepted and not (g.final and (g.links or g.spared) and (r is None or (r.settled and not r.listed))):
            return False
        if cfg.books and cfg.counting and t in s.dead and s.reaped[t]:
            return False
        if r and r.why == "dead" and not (t in s.dead or g.unlisted or (cfg.sqs and not cfg.books)):
            return False
    if s.results & s.erased or any(g.again and not g.erased and t not in s.results for t, g in enumerate(s.ghosts)):
        return False
    if s.index or s.fields or s.stored or s.reap or s.due:
        return False
    if s.lease and s.lease[0] != "none":
        return False
    if any(p != NOBODY for p in s.posts) or any(row.state == "due" for rows in s.rows for row in rows):
        return False
    return not (s.reader and s.ghosts[0].accepted and not s.reader[3])


def describe(s: State) -> str:
    records = [
        r and f"{r.status}{'+settled' if r.settled else ''}{' claim' if r.claim else ''}{' listed' if r.listed else ''}"
        for r in s.recs
    ]
    inflight = sorted((e[0], f"inc{e[1]}") for e in s.infl)
    lists = f"queue {[m[0] for m in s.queue]}, sorted {[m[0] for m in s.sorted]}, in flight {inflight}"
    if s.index or s.fields or s.stored or s.reap:
        fields = sorted((f.d, f"inc{f.inc}", f.msg[0], f.what) for f in s.fields)
        lists += f", index {sorted(s.index)}, fields {fields}, stored {sorted(s.stored)}, reap {s.reap}"
    rows = f", rows {[row[:4] for rows in s.rows for row in rows]}" if s.posts else ""
    return f"=> {lists}, records {records}, slots {[p.pc for p in s.slots]}{rows}"
