"""The scenarios: small worlds, each with a budget of faults that are allowed to happen in any order at any time."""

from __future__ import annotations

from tests.protocol.model.state import FAULTS, Cfg


def _world(
    name: str,
    *,
    tasks: int = 1,
    workers: tuple[int, ...] = (0, 1),
    length: int = 2,
    limit: int = 9,
    plain: bool = False,
    sqs: bool = False,
    split: bool = False,
    differ: bool = False,
    reader: bool = False,
    rival: bool = False,
    killer: int = 0,
    prompt: bool = False,
    lease: bool = False,
    orphan: bool = False,
    compact: bool = False,
    scaled: bool = False,
    strays: bool = False,
    broken: bool = False,
    kinds: tuple[tuple[int, int], ...] = (),
    posts: int = 0,
    books: bool = False,
    sent: bool = True,
    **faults: int,
) -> Cfg:
    """`length` tokens a task; given up at `limit` deaths; `split`: leases on broker and store lapse apart; `differ`:
    each slot writes tokens of its own, so that a mixed text shows; `killer`: task 0 kills whoever decodes it, and no
    more workers than that."""
    unknown = set(faults) - set(FAULTS)
    if unknown:
        raise ValueError(f"unknown faults {sorted(unknown)}; there are {', '.join(FAULTS)}")
    budget = tuple(faults.get(k, 0) for k in FAULTS)
    sent = sent and not plain
    return Cfg(
        name,
        tasks,
        workers,
        length,
        limit,
        plain,
        sqs or books,
        split,
        differ,
        reader,
        rival,
        killer,
        prompt,
        lease,
        sent,
        orphan,
        compact,
        scaled,
        strays,
        broken,
        kinds,
        posts,
        books,
        budget,
    )


_LIST = [
    _world("crash", crash=2, expire=2, differ=True),
    _world("lost", lost=2, crash=1, expire=1),
    _world("lapse", expire=2, crash=1, lost=1),
    _world("alone", workers=(0, 0), expire=2, crash=1, lost=1, limit=2),
    _world("cancel", cancel=1, expire=1, crash=1, deadline=1, lost=1),
    _world("cancel-again", cancel=2, expire=1, crash=1, lost=1),
    _world("split", split=True, expire=2, crash=1, differ=True),
    _world("drain", drain=1, expire=1, lost=1, crash=1, dup=1),
    _world("retry", retry=1, expire=1, crash=1, lost=1),
    _world("producer", sent=False, pcrash=2, lost=1, crash=1, ttl=1, cancel=1, length=1),
    _world("eager-producer", sent=False, pcrash=1, lost=1, cancel=1, crash=1, length=1),
    _world("late-producer", sent=False, pcrash=1, lost=1, deadline=1, crash=1, length=1),
    _world("rival", sent=False, rival=True, lost=1, pcrash=1, workers=(0,), length=1),
    _world("plain", plain=True, crash=1, lost=1, dup=1, ttl=1, expire=1, length=1),
    _world("poison", crash=2, expire=1, limit=2, lost=1, length=1),
    _world("broken", broken=True, dup=1, crash=1, expire=1, cancel=1, lost=1, length=1),
    _world("slow", crash=2, expire=1, limit=2),
    _world("killer", killer=2, limit=2, lost=1, length=1),
    _world("killer-copies", killer=5, limit=2, dup=1, length=1),  # each copy is counted anew once another was acked
    _world("killer-plain", plain=True, killer=7, limit=3, lost=1, length=1),
    _world("turned", killer=4, limit=2, turn=1, drain=1, crash=1, length=1),
    _world("turned-cancel", killer=4, limit=2, turn=1, cancel=1, expire=1, length=1),
    _world("innocent", tasks=2, workers=(0, 0), killer=2, limit=2, length=1),
    _world("innocent-both", tasks=2, workers=(0, 0, 1), killer=2, limit=2, length=1),
    _world("reader", reader=True, drop=1, crash=1, expire=1, cancel=1),
    _world("unread", lease=True, leave=1, lapse=1, lost=1, crash=1, length=1),
    _world("unread-producer", lease=True, sent=False, leave=1, lapse=1, pcrash=1, workers=(0,), length=1),
    _world("undone", undo=1, lost=1, crash=1, length=1),
    _world("undone-alone", undo=2, workers=(0,), expire=1, length=1),
    _world("strays", strays=True, unack=1, crash=1, length=1),
    _world("strays-slots", strays=True, workers=(0, 0), unack=1, length=1),
    _world("scaled", scaled=True, workers=(0,), crash=2, expire=1, lost=1, length=1),
    _world("scaled-two", scaled=True, crash=2, expire=1, length=1),
    _world("pools", scaled=True, kinds=((0, 0), (0, 1)), crash=2, drain=1),
    _world("pools-lapse", kinds=((0, 0), (0, 1)), crash=1, expire=1, drain=1, lost=1),
    _world("versions", plain=True, kinds=((0, 0), (1, 0)), crash=1, drain=1, lost=1),
    _world("versions-sent", kinds=((0, 0), (1, 0)), crash=1, cancel=1, lost=1),
    _world("tail", reader=True, tail=1, expire=1, lost=1),
    _world("prompt", prompt=True, tail=1, crash=1, expire=1, lost=1, deadline=1, length=1),
    _world("prompt-alone", prompt=True, tail=1, crash=1, expire=1, lost=1, drain=1, length=0),
    _world("slots", workers=(0, 0), dup=1, crash=1, lost=1, cancel=1),
    _world("sqs-lost", sqs=True, dup=1, lost=1, drain=1, ttl=1, length=1),
    _world("sqs", sqs=True, dup=2, crash=1, expire=1, differ=True),
    _world("sqs-cancel", sqs=True, dup=1, crash=1, expire=1, cancel=1, length=1),
    _world("mix", crash=1, expire=1, lost=1, cancel=1, drain=1, length=1),
    _world("sqs-retry", sqs=True, dup=1, retry=1, crash=1, expire=1, length=1),
    _world("three", workers=(0, 1, 2), crash=1, expire=2, dup=1, differ=True),
    _world("orphan", orphan=True, cancel=1, crash=1, expire=1, gone=1, lost=1, ttl=1, length=1),
    _world("orphan-plain", orphan=True, plain=True, cancel=1, crash=1, gone=1, lost=1, length=1),
    _world("orphan-poison", orphan=True, crash=2, expire=1, limit=2, gone=1, length=1),
    _world("compact", compact=True, reader=True, drop=1, crash=1, length=1),
    _world("outbox", posts=1, workers=(0,), crash=1, expire=1, cancel=1, deadline=1, dcrash=1, length=1),
    _world("outbox-unread", posts=1, workers=(0,), lease=True, leave=1, lapse=1, dcrash=1, length=1),
    _world("outbox-plain", posts=1, workers=(0,), plain=True, crash=1, ttl=1, dcrash=1, length=1),
    _world("outbox-rows", posts=2, workers=(0,), dcrash=1, stall=1, refuse=2, lost=1, replay=1, length=0),
    _world("outbox-undone", posts=1, workers=(0,), undo=1, unmark=1, dcrash=1, refuse=1, length=0),
    _world("delete", posts=1, workers=(0,), delete=1, crash=1, expire=1, lost=1, length=1),
    _world("delete-running", delete=1, crash=1, expire=1, lost=1, drain=1),
    _world("delete-producer", sent=False, delete=1, pcrash=1, lost=1, crash=1, length=1),
    _world("books", books=True, workers=(0,), crash=1, dup=1, late=1, length=0),
    _world("books-lapse", books=True, expire=1, crash=1, length=0),
    _world("books-tidy", books=True, workers=(0,), expire=1, crash=1, length=0),
    _world("books-drain", books=True, drain=1, crash=1, lost=1, length=1),
    _world("books-retry", books=True, retry=1, crash=1, length=1),
    _world("books-producer", books=True, workers=(0,), sent=False, pcrash=1, lost=1, length=0),
    _world("books-reap", books=True, crash=1, pcrash=1, dup=1, length=0),
    _world("books-broken", books=True, workers=(0,), broken=True, crash=1, lost=1, length=0),
    _world("books-killer", books=True, killer=2, limit=2, length=0),
    _world("books-innocent", books=True, tasks=2, workers=(0, 0), killer=2, limit=2, length=0),
    _world("books-later", books=True, workers=(0,), later=1, crash=1, pcrash=1, lost=1, length=0),
    _world("books-scaled", books=True, scaled=True, workers=(0,), crash=2, expire=1, length=0),
    _world("books-scaled-dup", books=True, scaled=True, workers=(0,), crash=1, dup=1, late=1, later=1, length=0),
    _world("books-old", books=True, workers=(0,), age=1, crash=1, length=0),
    _world("books-undone", books=True, workers=(0,), undo=1, crash=1, length=0),
    _world("two", tasks=2, length=1, crash=1, expire=1, cancel=1),
]


def with_faults(cfg: Cfg, **faults: int) -> Cfg:
    """The same world with another budget."""
    return cfg._replace(budget=tuple(faults.get(k, 0) for k in FAULTS))


SCENARIOS: dict[str, Cfg] = {cfg.name: cfg for cfg in _LIST}
