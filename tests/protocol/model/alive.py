"""Workers seen to be dead before their lease lapses, and living ones taken for dead (`docs/how/failover.md`).

worker:  subscribes to its alive channel on each server -> LEASE tells, by the server itself, whether it is heard there
looker:  stood for a lease, or JOIN, which counts where it is heard, and values that were written since -> two looks at
         both servers, each with its own channel heard -> END (store) -> REAP (broker)
taken and alive:  a new incarnation -> RELEASE, BACK -> RETRACT: the counts that were raised against its tasks

`State.alive` has facts (incarnation, server, what): `heard`, somebody listens to its channel; `says`, its lease value
says so; `stale`, that was written before the server dropped everybody; `late`, it lost its subscription and has not
renewed since; `stood`, as a looker, for a lease; `joined`, by JOIN. Without a server: `asleep` (suspended), `taken`
while it lives; and by task, `raised`: REAP counted a return. `State.watch` has (looker, target, how far); `owes`: what
was taken of it before.
`State.since` has (looker, target, server): the target's value there says no lower a number than JOIN answered the
looker. That is all that the counter tells, so that the model has no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.model import scripts
from tests.protocol.model.scripts import Rules
from tests.protocol.model.state import DOWN, FAULTS, Cfg, State, enqueue, put, spend

Step = tuple[str, bool, State]  # label, fair?, the world after it
Fact = tuple[int, str, str]


def servers(cfg: Cfg) -> str:
    """`b`: broker, and store where that is the same; `s`: the store."""
    return "sb" if cfg.split else "b"


def born(inc: int, cfg: Cfg, *, stood: bool = False) -> frozenset[Fact]:
    """It subscribes before it takes its lease."""
    return frozenset((inc, x, what) for x in servers(cfg) for what in ("heard", "says", "stood")[: 2 + stood])


def written(s: State, w: int, inc: int, cfg: Cfg, x: str) -> frozenset[tuple[int, int, str]]:
    """Who knows the value that LEASE writes now of worker w to be younger than their JOIN."""
    if w in cfg.old or w in cfg.uncounted:
        return frozenset()
    return frozenset((me, inc, x) for me, at, what in s.alive if (at, what) == (x, "joined") and me != inc)


def is_asleep(s: State, inc: int) -> bool:
    return (inc, "", "asleep") in s.alive


def outstanding(s: State) -> int:
    """Lives that were taken for dead, whose worker has not taken the counts back yet."""
    return sum(what == "taken" and inc in s.incs for inc, _, what in s.alive) + sum(w[2] == "owes" for w in s.watch)


def begun_anew(s: State, old: int, new: int) -> State:
    """A living worker that was taken owes it to its tasks to take the counts back."""
    watch = {(new, *w[1:]) if w[0] == old and w[2] == "owes" else w for w in s.watch}
    if (old, "", "taken") in s.alive:
        watch.add((new, old, "owes"))
    return s._replace(watch=frozenset(watch))


def known(s: State) -> State:
    """Without what no step reads any more."""
    owed = {w[1] for w in s.watch if w[2] == "owes" and w[0] in s.incs}
    mine = {"heard", "stood", "joined", "asleep", "taken"}
    facts = frozenset(
        (inc, x, what)
        for inc, x, what in s.alive
        if (
            inc in s.incs and not (what == "joined" and (inc, x, "stood") in s.alive)
            if what in mine
            else inc in owed or (inc in s.incs and (inc, "", "taken") in s.alive)
            if what == "raised"
            else inc in (s.lb if x == "b" else s.ls)
        )
    )
    watch = frozenset(w for w in s.watch if w[0] in s.incs and (w[2] == "owes" or w[1] in s.lb | s.ls & s.listed))
    since = frozenset(
        (me, one, x)
        for me, one, x in s.since
        if me in s.incs and (one, x, "says") in facts and (me, x, "stood") not in facts
    )
    return s._replace(alive=facts, watch=watch, since=since)


def alive_steps(s: State, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    for x in servers(cfg):
        if b := spend(s, "cut"):
            yield f"server {x} drops all its connections", False, _cut(s, x, rules)._replace(budget=b)
    for w, inc in enumerate(s.incs):
        if inc == DOWN:
            continue
        if is_asleep(s, inc):
            yield f"worker {w} goes on", True, s._replace(alive=s.alive - {(inc, "", "asleep")})
        else:
            if b := spend(s, "suspend"):
                yield f"worker {w} is suspended", False, s._replace(alive=s.alive | {(inc, "", "asleep")}, budget=b)
            if w not in cfg.old:
                yield from _own(s, w, inc, cfg, rules)
                yield from _looks(s, inc, cfg, rules)
            yield from _retract(s, w, inc, cfg, rules)
        for x in servers(cfg):
            if (b := spend(s, "deaf")) and (inc, x, "heard") in s.alive:
                after = _unheard(s, x, {inc}, rules)._replace(budget=b)
                yield f"inc{inc} loses its alive connection to {x}", False, after


def _cut(s: State, x: str, rules: Rules) -> State:
    """A restart, a failover, a fault of the network: leases stay as they are."""
    stale = {(inc, x, "stale") for inc, at, what in s.alive if (at, what) == (x, "says")}
    heard = {inc for inc, *fact in s.alive if fact == [x, "heard"]}
    return _unheard(s._replace(alive=s.alive | stale), x, heard, rules)


def _unheard(s: State, x: str, incs: set[int], rules: Rules) -> State:
    """Who subscribes anew joins anew, on both servers."""
    facts, since = s.alive - {(inc, x, "heard") for inc in incs} | {(inc, x, "late") for inc in incs}, s.since
    if "join_anew" in rules:
        facts = frozenset(fact for fact in facts if fact[2] != "joined" or fact[0] not in incs)
        since = frozenset(one for one in since if one[0] not in incs)
    return s._replace(alive=facts, since=since)


def _ready(s: State, inc: int, x: str) -> bool:
    """Whether it may look at all."""
    return not s.alive.isdisjoint({(inc, x, "joined"), (inc, x, "stood")})


def _own(s: State, w: int, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Its subscriptions and its lease. Who looks stood for a lease once no value is left that is older than it stands:
    each was renewed since, or has lapsed. Until then it may JOIN; afterwards that tells it nothing more. One JOIN alone
    does nothing: it is a step with the other."""
    old_values = any(what == "stale" for *_, what in s.alive)
    unready = {(inc, x, "joined") for x in servers(cfg) if not _ready(s, inc, x)}
    if old_values and unready and all((inc, x, "heard") in s.alive for x in servers(cfg)):
        yield f"inc{inc} JOINs", True, s._replace(alive=s.alive | unready)
    for x in servers(cfg):
        facts, lives = s.alive, inc in (s.lb if x == "b" else s.ls)
        heard = (inc, x, "heard") in facts
        if not heard:
            anew = facts - {(inc, x, "stood")} | {(inc, x, "heard")}
            yield f"inc{inc} subscribes on {x}", True, s._replace(alive=anew)
        old = any(f[1:] == (x, "stale") for f in facts)
        if lives:
            told = heard if "lease_tells" in rules else (inc, x, "says") in facts
            kept = facts - {(inc, x, what) for what in ("says", "late", "stale")}
            renewed = kept | {(inc, x, "says")} if told else kept
            since = s.since | written(s, w, inc, cfg, x) if told else s.since
            if (renewed, since) != (facts, s.since):
                yield f"LEASE renews inc{inc} on {x}", True, s._replace(alive=renewed, since=since)
        if heard and (inc, x, "stood") not in facts and not old:
            yield f"inc{inc} has stood on {x} for a lease", True, s._replace(alive=facts | {(inc, x, "stood")})


def _counts(s: State, me: int, x: str, rules: Rules) -> bool:
    """Whether what `me` hears of others on that server now says anything."""
    return (me, x, "heard") in s.alive or "look_heard" not in rules


def _silent(s: State, me: int, one: int, x: str, cfg: Cfg, rules: Rules) -> bool:
    lives = one in (s.lb if x == "b" else s.ls)
    says = (one, x, "says") in s.alive or "listens_said" not in rules
    told = lives and says and _judges(s, me, one, x, cfg, rules)
    return told and _counts(s, me, x, rules) and (one, x, "heard") not in s.alive


def _judges(s: State, me: int, one: int, x: str, cfg: Cfg, rules: Rules) -> bool:
    """Whether `me` knows that this value was written after it was heard there."""
    if (me, x, "stood") in s.alive or "looker_stood" not in rules:
        return True
    counted = all(s.incs[w] != one for w in cfg.uncounted)
    told = (me, one, x) in s.since or "value_since" not in rules or not (counted or "joins_said" in rules)
    return (me, x, "joined") in s.alive and told


def _gone_from_store(s: State, me: int, one: int, cfg: Cfg, rules: Rules) -> bool:
    if not cfg.split or "both_asked" not in rules:
        return True
    return _counts(s, me, "s", rules) and (one not in s.ls or _silent(s, me, one, "s", cfg, rules))


def _looks(s: State, me: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    if "looker_stood" in rules and not all(_ready(s, me, x) for x in servers(cfg)):
        return
    at = {w[1]: w[2] for w in s.watch if w[0] == me and w[2] != "owes"}
    # 250 ms are enough for a process that is not suspended to renew its lease.
    told = not any(what == "late" and inc in s.incs and not is_asleep(s, inc) for inc, _, what in s.alive)
    for one in (s.lb | (s.ls & s.listed)) - {me}:
        stage, others = at.get(one), s.watch - {(me, one, at.get(one, ""))}

        def to(state: State, stage: str, one: int = one, others: frozenset[tuple[int, int, str]] = others) -> State:
            return state._replace(watch=others | {(me, one, stage)} if stage else others)

        agreed = _silent(s, me, one, "b", cfg, rules) and _gone_from_store(s, me, one, cfg, rules)
        if stage is None:
            if agreed and "look_twice" in rules:
                yield f"inc{me} looks at inc{one}: silent", True, to(s, "once")
            elif agreed:
                yield from _take(s, me, one, cfg, rules, "once", to)
        elif stage == "once" and not agreed:
            if "reap_asks" in rules:
                yield f"inc{me} looks at inc{one}: not silent", True, to(s, "")
            else:
                yield from _take(s, me, one, cfg, rules, stage, to)
        elif stage != "once" or told:
            yield from _take(s, me, one, cfg, rules, stage, to)


def _take(s: State, me: int, one: int, cfg: Cfg, rules: Rules, stage: str, to) -> Iterator[Step]:  # type: ignore[no-untyped-def]
    """Both scripts ask once more themselves."""
    first = "end" if cfg.split and "store_first" in rules else "reap"
    if (stage == "once") == (first == "end"):
        if "reap_asks" not in rules or _gone_from_store(s, me, one, cfg, rules):
            yield (
                f"inc{me} ENDs the store's lease of inc{one}",
                True,
                to(_ended(s, one, cfg), "ended" if first == "end" else ""),
            )
        else:
            yield f"END of inc{one} by inc{me}: not silent", True, to(s, "")
    elif "reap_asks" not in rules or _silent(s, me, one, "b", cfg, rules):
        after = _reaped(s, one, cfg, rules)
        yield f"inc{me} REAPs inc{one} early", True, to(after, "reaped" if cfg.split and first == "reap" else "")
    else:
        yield f"REAP of inc{one} by inc{me}: not silent", True, to(s, "")


def wronged(s: State, one: int) -> str:
    """What is broken where this incarnation is taken now; nothing if its process is dead, or it was taken already."""
    if one not in s.incs or (one, "", "taken") in s.alive:
        return ""
    if any(inc == one and what == "heard" for inc, _, what in s.alive):
        return "S22 a worker was taken whose alive channel has a listener"
    if not is_asleep(s, one):
        return "S22 a living worker was taken that had lost only its alive connection"
    return ""


def _blame(s: State, one: int, cfg: Cfg) -> State:
    said = wronged(s, one)
    if (
        one in s.incs
        and (one, "", "taken") not in s.alive
        and not said
        and s.budget[FAULTS.index("deaf")] == cfg.budget[FAULTS.index("deaf")]
    ):
        said = "S22 a living worker was taken for what a server did"
    return s._replace(ghosts=put(s.ghosts, 0, s.ghosts[0]._replace(bad=said))) if said else s


def _ended(s: State, one: int, cfg: Cfg) -> State:
    s = _blame(s, one, cfg)
    excused = tuple(
        g._replace(excused=True) if r and r.owner == one and not r.settled else g
        for r, g in zip(s.recs, s.ghosts, strict=True)
    )
    taken = {(one, "", "taken")} if one in s.incs else frozenset[Fact]()
    return s._replace(ls=s.ls - {one}, ghosts=excused, alive=s.alive | taken)


def _reaped(s: State, one: int, cfg: Cfg, rules: Rules) -> State:
    """REAP takes lease, messages and listing at once."""
    s = _blame(s, one, cfg)
    mine = [e for e in s.infl if e[1] == one]
    reaped, facts = s.reaped, set(s.alive)
    if cfg.counting:
        for e in mine:
            reaped = put(reaped, e[2][0], min(reaped[e[2][0]] + 1, cfg.limit))
            facts.add((one, str(e[2][0]), "raised"))
    if one in s.incs:
        facts.add((one, "", "taken"))
    after = s._replace(
        infl=s.infl - set(mine),
        queue=enqueue(s.queue, *(e[2] for e in mine)),
        reaped=reaped,
        listed=s.listed - {one},
        alive=frozenset(facts),
    )
    if "reap_whole" in rules:
        after = after._replace(lb=s.lb - {one})
        after = after if cfg.split else _ended(after, one, cfg)
    return after


def _retract(s: State, w: int, inc: int, cfg: Cfg, rules: Rules) -> Iterator[Step]:
    """Once all is RELEASEd, no CLAIM to come counts a death of that life any more."""
    held = any(p.note == "lapsed" for i, p in enumerate(s.slots) if cfg.workers[i] == w)
    if held and "release_first" in rules:
        return
    for debt in [d for d in s.watch if d[0] == inc and d[2] == "owes"]:
        raised = [int(t) for old, t, what in s.alive if old == debt[1] and what == "raised"]
        reaped, recs = s.reaped, s.recs
        for t in raised if "reaped_back" in rules else ():
            reaped = put(reaped, t, max(0, reaped[t] - 1))
        if "deaths_back" in rules:
            recs = tuple(scripts.absolve(r, debt[1])[1] for r in recs)
        facts = frozenset(f for f in s.alive if f[0] != debt[1] or f[2] != "raised")
        yield (
            f"worker {w} takes the counts against inc{debt[1]} back",
            True,
            s._replace(reaped=reaped, recs=recs, alive=facts, watch=s.watch - {debt}),
        )
