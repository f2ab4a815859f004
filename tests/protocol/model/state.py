"""The world as one value, and small things done with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.protocol.model.scripts import FINAL, QUEUED, Rec, level_of

#: Faults that a scenario may spend. `turn`: from now on task 0 kills whoever decodes it. `leave`: the gateway of task
#: 0's reader dies; `lapse`: its lease lapses, and it lives; `gone`: the broker loses the message of a final task.
#: `undo`: a failover loses all that became of a record since it was queued, before its message was acked; `unack`: one
#: that loses the ACK, too, so that a live worker has it in flight again, and does not know it. Of the outbox: `dcrash`:
#: a deliverer is killed; `stall`: a row's lease ends while its deliverer lives; `refuse`: the receiver refuses, or its
#: answer is lost; `unmark`: a failover loses what became of a row, and keeps its final; `replay`: an operator asks;
#: `untaken`: a row has been due for so long that the sweeper gives it up. `delete`: whoever was told of a task deletes
#: it. Of plain Celery: `revoke`: a sender revokes a task, and a sweeper hears it; `again`: it forgets a result that it
#: has, and sends the same task again. Of SQS: `later`: a message is to come after more than 15 minutes; `late`: a
#: message that was deleted comes once more; `age`: all messages are so old that SQS will drop them. `deaf`: a worker
#: loses its alive connection to a server; `cut`: a server drops all; `suspend`: a worker is stopped for a while.
#: `hold`: a worker's breaker opens, and closes at last.
FAULTS = (
    "crash",
    "expire",
    "lost",
    "cancel",
    "drain",
    "retry",
    "dup",
    "ttl",
    "deadline",
    "pcrash",
    "drop",
    "tail",
    "undo",
    "unack",
    "turn",
    "leave",
    "lapse",
    "gone",
    "dcrash",
    "stall",
    "refuse",
    "unmark",
    "replay",
    "untaken",
    "delete",
    "revoke",
    "again",
    "later",
    "late",
    "age",
    "deaf",
    "cut",
    "suspend",
    "hold",
)
FAULT = {name: i for i, name in enumerate(FAULTS)}

#: Task, identity (only SQS needs one: a stale handle may delete it); then, in a queue of its own, its (version, pool).
Message = tuple[Any, ...]
Delivery = tuple[int, int, Message]  # uuid, incarnation (-1 on SQS), message
SQS = -1


class Cfg(NamedTuple):
    """A scenario. `workers[i]` is the process that slot i belongs to; `killer`: how many workers task 0 may kill;
    `prompt`: tasks have an entry for their prompt, before their tokens; `lease`: task 0's reader holds a lease;
    `orphan`, `compact`: the sweeper settles what others left, and compacts streams; `scaled`: FETCH sorts what it does
    not take, and whoever starts workers sees nothing but the list; `strays`: workers look for what they do not know;
    `broken`: no worker can make sense of a record that it has claimed, and keeps the message; `kinds[w]`: (version,
    pool) of worker w, where that matters, and its release's level; `need`: the level that tasks need; `posts`: how many
    deliver events, of which tasks then want all; `books`: of SQS, on the store; `alive`: workers look whether others
    are alive, but for those of an earlier release (`old`); leases of others do not tell the counter (`uncounted`);
    `native`: Celery has no part in the tasks, and FINISH settles them, but for workers of an earlier release;
    `follows`: task 0's reader has a channel of its process, which workers of an earlier release do not know."""

    name: str
    tasks: int
    workers: tuple[int, ...]
    length: int
    limit: int
    plain: bool
    native: bool
    sqs: bool
    split: bool
    differ: bool
    reader: bool
    follows: bool
    rival: bool
    killer: int
    prompt: bool
    lease: bool
    sent: bool
    orphan: bool
    compact: bool
    scaled: bool
    strays: bool
    broken: bool
    kinds: tuple[tuple[int, ...], ...]
    need: int
    posts: int
    books: bool
    alive: bool
    old: tuple[int, ...]
    uncounted: tuple[int, ...]
    budget: tuple[int, ...]

    @property
    def late(self) -> bool:
        """Whether it matters that a task was ever taken up."""
        return self.counting or self.posts > 0 or self.budget[FAULT["deadline"]] > 0

    @property
    def counting(self) -> bool:
        """Returns and claims are counted only where few faults reach the limit: elsewhere nobody reads them."""
        return self.limit < 9


class Slot(NamedTuple):
    """A worker's slot: what it does next (`pc`), message, delivery, claim, the text it has seen, and what it was told:
    `condemned` by FETCH, or `dead` where the task was given up, or `taken` where another published the prompt;
    `unscored`: it ends before its prompt was published; `buried`: its record is broken."""

    pc: str
    msg: Any = None
    d: Any = None
    c: Any = None
    prefix: tuple[Any, ...] = ()
    note: str = ""


class Field(NamedTuple):
    """What a worker has of SQS, in its books: by which receipt, and as what (`books`)."""

    d: int
    inc: int
    msg: Message
    what: str


class Look(NamedTuple):
    """How far a worker is in looking for strays: what it does next, with which deliveries, and which it found once."""

    pc: str = "books"
    what: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()


class Ghost(NamedTuple):
    """What only the checker knows of a task. `excused`: its owner was lost before SETTLE, so that links may go out
    again; `unlisted`: the broker lost the message of a task that was given up, so that no dead letter may be kept;
    `idle`: times in a row that it was taken up and nothing came of it; `spared`: settled with no links to send, or none
    that are known; `undone`: a failover lost its end, whose links went out or will; `letters`: dead letters kept;
    `blurred`: SQS showed its message to two; `erased`: it was deleted; `again`: it was sent once more."""

    accepted: bool
    final: str | None = None
    cancelled: bool = False
    links: int = 0
    excused: bool = False
    unlisted: bool = False
    idle: int = 0
    spared: bool = False
    undone: bool = False
    letters: int = 0
    blurred: bool = False
    erased: bool = False
    again: bool = False
    bad: str = ""


class Row(NamedTuple):
    """A row of the outbox: one event of a task for its one destination. `held`: its holder's lease stands. What only
    the checker knows: `got`: the receiver has it; `overruled`: its holder was, while its lease stood."""

    event: str
    state: str = "due"
    holder: Any = None
    held: bool = False
    tries: int = 0
    got: bool = False
    overruled: bool = False


class Post(NamedTuple):
    """A deliverer: what it does next (`pc`: idle, send, tell), with which row (task, event), taken as which holder, and
    whether its receiver said 200."""

    pc: str
    row: Any = None
    holder: Any = None
    ok: bool = False


class State(NamedTuple):
    """`lb`, `ls`: incarnations whose lease is alive on broker and store. `prods[p]`: producer p, of task p % tasks.

    `sorted`: what FETCH took off the list, by tenant; `listed`: incarnations that REAP knows of. `incs[w]` is DOWN
    while no process w runs. `looks`: per worker, see `fleet`; `unknown`: deliveries with their claims that a failover
    brought back; `kinds`: (incarnation, its kind) of all with a lease; `rows`: of the outbox, per task;
    `posts`: deliverers. Of SQS's books: `index`: (task, its age: `true`, `old`, or `new` whatever its message is);
    `fields`: in flight; `stored`: tasks to be sent later; `reap`: the incarnation that is reaped, and its fields to be
    made visible; `due`: what is being sent from the store; `old`: messages that SQS will drop. `alive`, `watch`,
    `since`: see `alive`. `held`: worker processes that are held back: they fetch nothing, and CLAIM counts them for no
    pool. `erased`: tasks that were deleted, as the store has noted; `revoked`: those that were revoked before they had
    a record; `results`: plain ones whose result Celery has, where they may be deleted or sent again."""

    queue: tuple[Message, ...]
    infl: frozenset[Delivery]
    lb: frozenset[int]
    ls: frozenset[int]
    incs: tuple[int, ...]
    slots: tuple[Slot, ...]
    recs: tuple[Rec | None, ...]
    ghosts: tuple[Ghost, ...]
    prods: tuple[str, ...]
    sweep: tuple[str, int] | None
    reader: Any
    lease: Any
    reaped: tuple[int, ...]
    dead: frozenset[int]
    kills: int
    budget: tuple[int, ...]
    sorted: tuple[Message, ...] = ()
    listed: frozenset[int] = frozenset()
    looks: tuple[Look, ...] = ()
    unknown: frozenset[tuple[int, int]] = frozenset()
    kinds: frozenset[tuple[int, tuple[int, ...]]] = frozenset()
    rows: tuple[tuple[Row, ...], ...] = ()
    posts: tuple[Post, ...] = ()
    index: frozenset[tuple[int, str]] = frozenset()
    fields: frozenset[Field] = frozenset()
    stored: frozenset[int] = frozenset()
    reap: tuple[int, tuple[Field, ...]] | None = None
    due: tuple[str, int] | None = None
    old: frozenset[Message] = frozenset()
    alive: frozenset[tuple[int, str, str]] = frozenset()
    watch: frozenset[tuple[int, int, str]] = frozenset()
    since: frozenset[tuple[int, int, str]] = frozenset()
    held: frozenset[int] = frozenset()
    erased: frozenset[int] = frozenset()
    revoked: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()


IDLE = Slot("idle")
#: A deliverer that has nothing to do.
NOBODY = Post("idle")
#: The incarnation of a worker process that does not run.
DOWN = 0


def fresh(used: Iterable[Any]) -> int:
    taken, n = set(used), 1
    while n in taken:
        n += 1
    return n


def put(t: tuple[Any, ...], i: int, v: Any) -> tuple[Any, ...]:
    return (*t[:i], v, *t[i + 1 :])


def enqueue(q: tuple[Message, ...], *messages: Message) -> tuple[Message, ...]:
    """The order in a queue is not modelled: any message may be the next one fetched."""
    return tuple(sorted(q + messages, key=order if len(q) + len(messages) > 1 else None))


def order(m: Message) -> tuple[Any, ...]:
    """By task and identity; then by the queue of its own, whose pool may be None."""
    return (m[0], m[1], *(-1 if part is None else part for part in m[2])) if len(m) > 2 else m


def without(q: tuple[Message, ...], m: Message) -> tuple[Message, ...]:
    i = q.index(m)
    return q[:i] + q[i + 1 :]


def message(s: State, cfg: Cfg, t: int) -> Message:
    if not cfg.sqs:
        return (t, 0, (0, None, cfg.need)) if cfg.need and not cfg.plain else (t, 0)
    noted = {f.msg[1] for f in s.fields} | {f.msg[1] for f in (s.reap[1] if s.reap else ())}
    there = {m[1] for m in s.queue} | {e[2][1] for e in s.infl} | {p.msg[1] for p in s.slots if p.msg}
    return (t, fresh(there | noted | {m[1] for m in s.old}))


def queued_record(cfg: Cfg) -> Rec:
    """As it was sent, or is made of a plain Celery message."""
    queued = QUEUED._replace(need=cfg.need) if cfg.need else QUEUED
    return queued._replace(hook=FINAL | {"in_progress"}) if cfg.posts else queued


def of_kind(s: State, w: int, inc: int, cfg: Cfg) -> frozenset[tuple[int, tuple[int, ...]]]:
    """`kinds` with a new incarnation of worker w."""
    return s.kinds | {(inc, cfg.kinds[w])} if cfg.kinds else s.kinds


def serving(s: State, leases: frozenset[int]) -> set[tuple[int, ...]]:
    """The kinds that have a live worker."""
    return {kind for inc, kind in s.kinds if inc in leases}


def held_back(s: State) -> set[int]:
    """Incarnations that are held back."""
    return {s.incs[w] for w in s.held}


def served_by(m: Message, kind: tuple[int, ...] | None) -> bool:
    """Whether a worker of this kind takes it from where it waits."""
    if len(m) < 3 or kind is None:
        return True
    return m[2][0] == kind[0] and m[2][1] in (kind[1], None) and level_of(m[2]) <= level_of(kind)


def spend(s: State, fault: str) -> tuple[int, ...] | None:
    """The budget after one such fault; None where none is left."""
    i = FAULT[fault]
    return put(s.budget, i, s.budget[i] - 1) if s.budget[i] else None


def toxic(s: State, cfg: Cfg, p: Slot) -> bool:
    """Whoever holds this slot's message dies of decoding it: before CLAIM, or after it where it came condemned."""
    return (
        cfg.killer > 0
        and not s.budget[FAULT["turn"]]
        and p.msg is not None
        and p.msg[0] == 0
        and (p.pc == "run" or (p.pc == "got" and p.note != "condemned"))
    )


def is_suspect(s: State, cfg: Cfg, t: int) -> bool:
    """One more return and the task is condemned."""
    return cfg.counting and 0 < s.reaped[t] >= cfg.limit - 1
