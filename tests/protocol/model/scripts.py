"""The scripts on a task's record, as pure functions: (record, arguments) -> (answer, record). Each runs atomically.

`rules` are those in force. The Lua scripts are compared with these functions under all rules.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Any, NamedTuple

FINAL = frozenset({"completed", "cancelled", "failed", "incomplete"})
Rules = frozenset[str]


class Rec(NamedTuple):
    """A record and its stream. `listed`: it stands in the sweeper's index. `why`: dead, expired or unserved, where
    given up. `stream` holds the tokens; `prompt`, of each entry of the prompt's, how many tokens stand before it;
    `counted`: the prompt's tokens, where known; `at`: where its entries are, in the stream or, once compacted, in the
    result; `dated`: it says when it was queued; `kind`: (version, pool) that took it up last, or as it was sent
    (version, None); `need`: the level of its worker's release that it asks for; `hook`: the events that somebody
    wants to hear of; `told`: those whose rows were written, in order; `lost`: the owners whose deaths were counted, in
    order; `waits`: how often the counts of what waits have it; `letter`: its message is to be kept as a dead letter, as
    whoever settled it said."""

    status: str = "submitting"
    cancel: bool = False
    expired: bool = False
    claim: Any = None
    owner: Any = None
    deaths: int = 0
    settled: bool = False
    stream: tuple[Any, ...] = ()
    next: tuple[int, ...] = (0,)
    end: str | None = None
    claims: int = 0
    nonce: Any = None
    listed: bool = True
    why: str | None = None
    stuck: int = 0
    mark: int = 0
    prompt: tuple[int, ...] = ()
    discarded: int = 0
    counted: int | None = None
    at: str = "stream"
    dated: bool = False
    kind: Any = None
    need: int = 0
    hook: frozenset[str] = frozenset()
    told: tuple[str, ...] = ()
    lost: tuple[Any, ...] = ()
    waits: int = 0
    letter: bool = False

    @property
    def length(self) -> int:
        """Entries in the stream, but for the terminal one."""
        return len(self.prompt) + len(self.stream)


#: So many times the limit of deaths, and a task is given up though it got on.
STRETCH = 4
SUBMITTED = Rec(waits=1)
QUEUED = Rec(status="queued", listed=False, waits=1)


def _final(r: Rec, status: str, rules: Rules, **changes: Any) -> Rec:
    """The one way to become final: status, terminal entry and rows of the outbox together."""
    r = _waits_no_more(r, rules) if "final_uncounts" in rules else r
    return _tell(_left(r, rules)._replace(status=status, end=r.end or status, **changes), status, rules)


def _tell(r: Rec, event: str, rules: Rules) -> Rec:
    """The event's row is written, if somebody wants to hear of it."""
    return r._replace(told=(*r.told, event)) if event in r.hook and "row_in_script" in rules else r


def _waits_no_more(r: Rec, rules: Rules) -> Rec:
    """The counts of what waits lose it, if they have it."""
    return r._replace(waits=r.waits - 1) if r.waits or "waits_noted" not in rules else r


def _left(r: Rec, rules: Rules) -> Rec:
    """The record has left `submitting`, and the sweeper's index with it."""
    return r._replace(listed=False) if r.listed and "index_left" in rules else r


def _late(r: Rec, rules: Rules, why: str = "expired", **changes: Any) -> Rec:
    """Its deadline passed, and nobody live has it."""
    begun = r.claims > 0 and "late_begun" in rules
    return _final(r, "incomplete" if begun else "failed", rules, why=why, **changes)


def admit(
    r: Rec | None,
    nonce: Any,
    late: bool,
    rules: Rules,
    new: Rec = SUBMITTED,
    *,
    erased: bool = False,
    full: bool = False,
) -> tuple[str, Rec | None]:
    """`erased`: a task with this id was deleted. `full`: the server has no room for it, and it was not taken before."""
    if r is not None and "admit_absent" in rules:
        return ("mine" if r.nonce == nonce or "admit_nonce" not in rules else "exists"), r
    if erased:
        return "erased", r
    if late:
        return "late", r
    if full:
        return "storage", r
    return "new", new._replace(nonce=nonce)


def queued(r: Rec | None, rules: Rules) -> tuple[str, Rec | None]:
    if r is None:
        return "gone", r
    if r.status == "submitting" or "mark_cas" not in rules:
        return "queued", r._replace(status="queued", listed=False, dated=True)
    return r.status, r._replace(listed=False)


def claim(
    r: Rec | None,
    c: Any,
    inc: Any,
    live: Container[Any],
    rules: Rules,
    *,
    limit: int,
    made: Rec | None = None,
    condemned: bool = False,
    kind: Any = None,
    serving: Collection[Any] = (),
    erased: bool = False,
    revoked: bool = False,
) -> tuple[str, Rec | None]:
    """`made`: the record that a plain message makes; None for a client's message, whose record ADMIT made. `kind`: the
    worker's (version, pool), with its level where that matters; `serving`: the kinds that have a live worker.
    `erased`: as of `admit`. `revoked`: REVOKE has noted this id."""
    if "claim_lease" in rules and inc not in live:
        return "lost", r
    if r is None:
        if made is None and "gone_drop" in rules:
            return "done", r
        if erased and "erase_noted" in rules:
            return "erased", r
        if (
            made
            and made.need > level_of(kind)
            and able((*kind[:1], None), made.need, serving)
            and "claim_level" in rules
        ):
            return "elsewhere", r  # who cannot read the message makes no record of it
        cancel = revoked and made is not None and "revoke_noted" in rules
        r = (made or QUEUED)._replace(waits=0, cancel=cancel)  # nobody counted a plain message
    if "claim_idem" in rules and r.claim == c:
        return ("settle" if r.status in FINAL else "go"), r
    if r.settled:
        return "done", r
    busy = r.claim is not None and r.owner in live and "claim_live" in rules
    if r.status in FINAL and (not busy or "settle_claimed" not in rules):
        return "settle", r._replace(claim=c, owner=inc)
    if "owner_first" not in rules and (r.cancel or r.expired):
        return "settle", _final(r, "cancelled", rules) if r.cancel else _late(r, rules)
    if busy:
        return "busy", r
    if not r.cancel and not r.expired and elsewhere(r, kind, serving, rules, bound=made is None):
        return "elsewhere", r
    died = r.claim is not None
    got_on = r.length > r.mark and "progress_absolves" in rules
    lost = (*r.lost, r.owner) if died else r.lost
    r = _left(r, rules)._replace(
        claim=c, owner=inc, lost=lost, deaths=r.deaths + died, stuck=0 if got_on else r.stuck + died
    )
    if "claim_dates" in rules:
        r = r._replace(dated=True)
    if r.cancel:
        return "settle", _final(r, "cancelled", rules)
    if r.expired:
        return "settle", _late(r, rules)
    given_up = r.stuck >= limit or r.deaths >= STRETCH * limit
    if given_up or (condemned and not r.claims and "condemned_fails" in rules):
        return "settle", _final(r, "failed", rules, why="dead")
    if not r.claims or "progress_once" not in rules:
        r = _tell(r, "in_progress", rules)
    r = _waits_no_more(r, rules) if "claim_uncounts" in rules else r
    return "go", r._replace(status="in_progress", claims=r.claims + 1, mark=r.length, kind=kind and kind[:2])


def level_of(kind: Any) -> int:
    """The level of a worker's release: the third part of its kind, where that matters."""
    return kind[2] if kind and len(kind) > 2 else 0


def able(home: Any, need: int, serving: Iterable[Any]) -> bool:
    """Whether a worker of this (version, pool or None) lives that can do what a task needs."""
    return any(kind[0] == home[0] and home[1] in (kind[1], None) and level_of(kind) >= need for kind in serving)


def elsewhere(r: Rec, kind: Any, serving: Iterable[Any], rules: Rules, *, bound: bool) -> Any:
    """(version, None) or (version, pool) whose queue the task's message belongs to, and with it the level that it
    needs, above 0; None where that is the caller's. `bound`: it was sent to a version; else it belongs to one once it
    is begun."""
    begun = r.length > 0
    level = (r.need,) if r.need else ()
    if r.kind is not None and r.kind[0] != kind[0]:
        return (r.kind[0], None, *level) if (begun or bound) and "claim_version" in rules else None
    own = begun and r.kind is not None and r.kind[:2] != kind[:2]
    if own and able(r.kind, r.need, serving) and "claim_pool" in rules:
        return (*r.kind[:2], *level)
    return (kind[0], None, *level) if r.need > level_of(kind) and "claim_level" in rules else None


def prompt(r: Rec | None, c: Any, entries: int, rules: Rules, *, full: bool = False) -> tuple[str, Rec | None]:
    """`entries`: how many they are. `full`: as of `append`."""
    if r is None:
        return "gone", r
    if "prompt_fence" in rules and (r.claim != c or r.status in FINAL):
        return "other", r
    if r.cancel:
        return "cancel", r
    if r.prompt and "prompt_once" in rules:
        return "ok", r
    if full:
        return "full", r
    return "ok", r._replace(prompt=r.prompt + (len(r.stream),) * entries)


def append(
    r: Rec | None,
    c: Any,
    choice: int,
    i: int,
    entries: tuple[Any, ...],
    rules: Rules,
    *,
    scored: bool = False,
    discarded: int = 0,
    counted: int = 0,
    full: bool = False,
) -> tuple[str, int, Rec | None]:
    """Answers and the choice's next index. `entries` are the choice's tokens from index `i` on; `scored`: PROMPT came
    before; `counted`: the prompt's tokens, 0 where there is nothing to say; `full`: the server has no room for its
    tier's tokens, and its worker says them again."""
    if r is None:
        return "gone", 0, r
    if (r.claim != c and "append_claim" in rules) or (r.status in FINAL and "append_final" in rules):
        return "other", 0, r
    if counted and r.counted is None:
        r = r._replace(counted=counted)
    if discarded:
        r = r._replace(discarded=discarded)
    at = r.next[choice]
    if r.cancel:
        return "cancel", at, r
    if scored and not r.prompt and "prompt_first" in rules:
        return "resend", at, r
    if "append_index" in rules:
        if i > at:
            return "resend", at, r
        entries = entries[at - i :]  # what was applied already is not published again
    if not entries:
        return "ok", at, r
    if full:
        return "full", at, r
    at += len(entries)
    nexts = (*r.next[:choice], at, *r.next[choice + 1 :])
    return "ok", at, r._replace(stream=r.stream + entries, next=nexts)


def finish(
    r: Rec | None,
    c: Any,
    nexts: tuple[int, ...],
    rules: Rules,
    status: str = "completed",
    *,
    scored: bool = False,
    settles: bool = False,
) -> tuple[str, Rec | None]:
    """The result of a task that generates nothing is a part of the terminal entry: here such a task is one of no
    tokens, and has no state of its own. `settles`: Celery has no part in it, and it is settled by the same call. Called
    again, that answers `won` to whoever calls: the message of a settled task is to be acked."""
    if settles:
        answer, after = finish(r, c, nexts, rules, status, scored=scored) if not (r and r.settled) else ("won", r)
        return answer, settle(after)[1] if answer == "won" else after
    if r is None:
        return "gone", r
    if "finish_fence" in rules:
        if r.status in FINAL:
            return ("won" if r.claim == c and "finish_idem" in rules else "other"), r
        if r.claim != c:
            return "other", r
    if r.cancel and "finish_cancel" in rules:
        return ("won", _final(r, "cancelled", rules)) if "cancel_wins" in rules else ("other", r)
    if nexts != r.next and "finish_next" in rules:
        return "resend", r
    if scored and not r.prompt and "prompt_first" in rules:
        return "resend", r
    return "won", _final(r, status, rules)


def settle(r: Rec | None, *, letter: bool = False, erased: bool = False) -> tuple[int, Rec | None]:
    if r is None:
        return -2 if erased else -1, r
    if r.status not in FINAL:
        return 0, r
    return 1, r._replace(settled=True, claim=None, owner=None, letter=r.letter or letter)


def orphan(r: Rec | None, live: Container[Any], rules: Rules, *, needs: bool, gone: bool) -> tuple[str, Rec | None]:
    """`needs`: its message, by what it is or how it ended; `gone`: that is nowhere any more, or it needs none."""
    if r is None:
        return "gone", r
    if r.status not in FINAL or r.settled:
        return "settled" if r.settled else "open", r
    if r.owner is not None and r.owner in live:
        return "owned", r
    if needs and not gone and "orphan_message" in rules:
        return "message", r
    return "settled", settle(r)[1]


def compact(r: Rec | None, entries: int, rules: Rules) -> tuple[str, Rec | None]:
    """`entries`: how many were read of the stream, the terminal one among them."""
    if r is None:
        return "gone", r
    if r.at != "stream":
        return "done", r
    if not r.settled and "compact_settled" in rules:
        return "unsettled", r
    if entries != r.length + (r.end is not None):
        return "changed", r
    return "done", r._replace(at="result" if "compact_once" in rules else "nowhere")


def release(r: Rec | None, c: Any, rules: Rules, *, buried: bool = False) -> tuple[int, Rec | None]:
    """`buried`: its message goes to the dead letters, and Celery has its part: it ends, and is settled."""
    unheld = buried and r is not None and r.claim is None and r.status not in FINAL
    if r is None or (r.claim != c and not unheld and "release_fence" in rules):
        return 0, r
    if buried and "bury_ends" in rules:
        if r.status not in FINAL:
            r = _final(r, "cancelled", rules) if r.cancel else _final(r, "failed", rules, why="dead")
        return settle(r, letter=True)
    if r.status in FINAL:
        return (1, r._replace(claim=None, owner=None)) if "release_final" in rules else (0, r)
    again = "release_counts" in rules
    return 1, r._replace(
        status="queued", claim=None, owner=None, waits=1 if again and "waits_noted" in rules else r.waits + again
    )


def absolve(r: Rec | None, inc: Any) -> tuple[int, Rec | None]:
    """That owner lives: its death is not counted any more. `stuck` counts the last ones of `lost`."""
    if r is None or inc not in r.lost:
        return 0, r
    at = r.lost.index(inc)
    stuck = r.stuck - (at >= len(r.lost) - r.stuck)
    return 1, r._replace(deaths=r.deaths - 1, stuck=stuck, lost=r.lost[:at] + r.lost[at + 1 :])


def expire(r: Rec | None, live: Container[Any], rules: Rules) -> tuple[str, Rec | None]:
    """The status after it. Only where it is too late, or cancelled, and nobody live owns the task."""
    if r is None:
        return "gone", r
    if r.status in FINAL or not (r.expired or (r.cancel and "cancel_swept" in rules)):
        return r.status, r
    if r.owner is not None and r.owner in live:  # who ends it itself, with all that its text needs
        return r.status, r
    if r.status == "submitting" and "expire_submitting" in rules:
        return r.status, r
    if r.cancel and "expire_cancel" in rules:
        return "cancelled", _final(r, "cancelled", rules, claim=None, owner=None)
    ended = _late(r, rules, claim=None, owner=None)
    return ended.status, ended


def unserved(
    r: Rec | None, live: Container[Any], version: Any, serving: Collection[Any], rules: Rules, *, aged: bool
) -> tuple[str, Rec | None]:
    """The task needs a later release than any that lives of its version, and one lives. `aged`: it is old enough;
    `serving`: as of `claim`."""
    if r is None:
        return "gone", r
    up = [kind for kind in serving if kind[0] == version]
    if r.status not in {"queued", "in_progress"} or not r.need or not aged or (r.owner is not None and r.owner in live):
        return r.status, r
    if not up or any(level_of(kind) >= r.need for kind in up):
        return r.status, r
    return "ended", _late(r, rules, why="unserved", claim=None, owner=None)


def cancel(r: Rec | None, live: Container[Any], rules: Rules) -> tuple[bool, str, Rec | None]:
    """Accepted?, and the status after it. A task that nobody live owns is final at once, settled at its next CLAIM."""
    if r is None:
        return False, "gone", r
    if r.status in FINAL:
        return False, r.status, r
    r = r._replace(cancel=True)
    if (r.owner is not None and r.owner in live) or (r.status == "submitting" and "cancel_submitting" in rules):
        return True, r.status, r
    return True, "cancelled", _final(r, "cancelled", rules, claim=None, owner=None)


def revoke(r: Rec | None, live: Container[Any], rules: Rules) -> tuple[str, Rec | None]:
    """What was done: `noted`, for a task without a record; `owned`, where a live worker has it and hears of it by
    itself; else the status after CANCEL."""
    if r is None:
        return "noted", r
    if r.owner is not None and r.owner in live and "revoke_owned" in rules:
        return "owned", r
    _, status, r = cancel(r, live, rules)
    return status, r


def delete(r: Rec | None, rules: Rules) -> tuple[str, Rec | None]:
    """The status before it, and the record as its readers have it last. There is none afterwards, nor a row of it."""
    if r is None:
        return "gone", r
    if r.status in FINAL or "delete_ends" not in rules:
        return r.status, r
    return r.status, _final(r._replace(hook=frozenset()), "cancelled", rules)


def unread(
    r: Rec | None, lease: int | None, over: int, now: int, live: Container[Any], rules: Rules
) -> tuple[tuple[bool, str] | None, int | None, Rec | None]:
    """What CANCEL said, None where nothing was done; and the lease after it. `lease`: when that of the task's reader
    ends; `over`: when the one ended that was found lapsed."""
    if "unread_lease" in rules and (lease is None or lease != over or over > now):
        return None, lease, r
    accepted, status, r = cancel(r, live, rules)
    return (accepted, status), None, r
