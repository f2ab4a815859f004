"""Lets callers who use most of a gateway's time wait, while it is behind with its work.

    a request's steps on the event loop, its bytes, its work on threads ─▶ time that its caller has used (`Share`)
    each LOOK_S: how late the loop came to it ─▶ behind: a cap on each caller's time, which falls; else it rises to none
    a request of a caller that has used more than the cap ─▶ waits in its caller's line until that is paid off

One process answers all callers. Limits of keys count tasks, but what is refused, or only reads, takes time as well: a
caller with many connections would have most of it. A caller who is alone has all of it, and none waits while the loop
keeps up. A caller is a tenant whose key works, else an address (`caller_of`).

Time is measured by a clock on the wall, since the processor's own costs twenty times as much to read. So what other
processes take of the processor meanwhile is counted as well, to all callers alike.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Time (s) between two looks at the loop.
LOOK_S: Final = 0.05
#: The loop is behind if it comes later than the first (s) to what it has to do, on average; it keeps up if not even
#: later than the second. Between them a cap stays as it is.
BEHIND_S, KEEPS_UP_S = 0.002, 0.0005
#: It is to blame for that only if its process computes for this part of the time in which it had a core: else others
#: have the processor. So callers together always have that much.
BUSY: Final = 0.5
#: Weight of the latest look in the averages.
WEIGHT: Final = 0.2
#: The first cap: seconds that each caller may use in a second. By how much one look changes it, and the cap that is
#: none.
FIRST, FALLS, RISES, NONE = 0.4, 0.8, 1.02, 1.0
#: The cap never falls below what each of those who use most would have of so many seconds a second, if they shared
#: equally what the others leave of them.
SHARED: Final = 0.4
#: There is a cap only while some caller uses less than this part of it: callers who all use much are alike.
LIGHT: Final = 0.8
#: A request that is refused, only asks whether this process is well, or loads a page counts as so many: nobody needs
#: many of them, and the store and its server work for them as well.
IDLE_TALK: Final = 4
#: Seconds that a caller who has used little may use at once.
DEPTH_S: Final = 0.03
#: Time (s) between two sweeps over what each caller uses; and before the first cap, so that a flood is soon told.
SWEEP_S, FIRST_SWEEP_S = 1.0, 0.25
#: Time (s) for which a caller counts as one of the callers after its latest request.
KEPT_S: Final = 10.0
#: Seconds a second that a mere prober of this process's health may use without being one of the callers.
LITTLE_S: Final = 0.05
#: Callers that are told apart, of which half are kept for tenants; further ones are taken for one.
MOST_CALLERS: Final = 10_000
#: Requests of one caller that may wait; a further one is refused.
MOST_WAITING: Final = 512
#: A request is taken to use no less than this (s), where it is told how many of a line may begin at once.
LEAST_S: Final = 1e-4
#: Shortest and longest time (s) until a line is looked at again.
SOON_S, LATE_S = 0.002, 0.25


def is_tenant(caller: Hashable) -> bool:
    """Whether a caller is a tenant whose key works, `("tenant", its name)`, and not a mere address."""
    return isinstance(caller, tuple) and caller[0] == "tenant"


def equal_part(demands: Sequence[float], together: float) -> float:
    """The most that each may have so that all have `together`: who wants less leaves the rest to the others. `demands`
    is sorted; if that is less than all, the rest is left to the last one."""
    for at, demand in enumerate(demands):
        part = together / (len(demands) - at)
        if demand > part or at == len(demands) - 1:
            return part
        together -= demand
    return together


class Share:
    """The time of one caller."""

    __slots__ = (
        "_all",
        "at",
        "before",
        "counted",
        "debt",
        "first",
        "last_request_at",
        "line",
        "open",
        "running",
        "step",
        "used",
    )

    def __init__(self, fair_share: FairShare) -> None:
        self._all = fair_share
        self.used = self.before = 0.0
        """Seconds that were used by all of its requests, and by those up to the latest sweep."""
        self.open = 0
        """Requests that have not ended, but those that ask for this process's health alone."""
        self.running = 0
        """Requests whose answer has not begun, and others that were let go on up to their next turn: what they will use
        is not known yet. Some wait long for their tasks."""
        self.first = 0.001
        """Seconds that a request uses, or a part of one up to its next turn, on average."""
        self.step: Measured[Any] | None = None
        """What runs now."""
        self.line: deque[asyncio.Future[bool]] = deque()
        """Requests that wait, the next one first."""
        self.last_request_at = float("-inf")
        """When (monotonic) it asked for anything but this process's health."""
        self.debt = self.counted = self.at = 0.0
        """Seconds by which it has used more than the cap, of `counted` used ones, at a time (monotonic)."""

    @property
    def capped(self) -> bool:
        """Whether callers who use much wait for their turns now."""
        return self._all.behind

    def of(self, caller: Hashable) -> Share:
        """The share of another caller of this gateway."""
        return self._all.of(caller)

    async def turn(self) -> None:
        """Wait while it has used more than the cap, unless many requests of it wait already."""
        step = self.step
        if step is not None:
            self.learn(step.since())
            step.pause()
        if not self._all.may(self, time.monotonic()) and (turn := self._all.wait(self)) is not None:
            await turn
        if step is not None:
            step.go_on()

    def learn(self, used: float, counts: int = 1) -> None:
        """Take what a request has used, s; it counts as so many."""
        self.used += (counts - 1) * used
        self.first += WEIGHT * (counts * used - self.first)


#: The share of the caller whose request is handled now, to which threads and further tasks charge their time.
SHARE: Final[ContextVar[Share | None]] = ContextVar("share", default=None)


class Measured(Generator[Any, Any, T]):
    """A coroutine, each step of which is charged to a caller."""

    __slots__ = ("_goes_on", "_reported", "_steps", "share", "used")

    def __init__(self, steps: Coroutine[Any, Any, T], share: Share) -> None:
        self._steps = steps
        self.share = share
        self.used = self._reported = 0.0
        self._goes_on = False

    def since(self) -> float:
        """Seconds that it has used since this was last asked."""
        used, self._reported = self.used - self._reported, self.used
        return used

    def move(self, share: Share) -> None:
        """Charge this step, which runs now, and all further ones to another caller."""
        self.pause()
        self.share = share
        share.step = self

    def go_on(self) -> None:
        """Count as running up to the next `pause`, or the end."""
        self._goes_on = True
        self.share.running += 1

    def pause(self) -> None:
        self.share.running -= self._goes_on
        self._goes_on = False

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        share, began = self.share, time.perf_counter()
        before, share.step = share.step, self
        try:
            return self._steps.send(value)
        except BaseException:
            self.pause()
            raise
        finally:
            share.step = before
            if self.share is not share:  # it was moved
                self.share.step = None
            self._charge(time.perf_counter() - began)

    def throw(self, *error: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._steps.throw(*error)
        except BaseException:
            self.pause()
            raise
        finally:
            self._charge(time.perf_counter() - began)

    def close(self) -> None:
        self.pause()
        self._steps.close()

    def _charge(self, used: float) -> None:
        self.used += used
        self.share.used += used


def charge_to(caller: Hashable) -> None:
    """Charge what the request that is handled now does from here on to this caller: its key's tenant is known now."""
    share = SHARE.get()
    if share is not None:
        SHARE.set(share.of(caller))
        if share.step is not None:
            share.step.move(share.of(caller))


async def in_thread(do: Callable[..., T], *arguments: Any) -> T:
    """Run `do` on a thread, and return or raise what it does. The processor time that it takes is charged to the caller
    whose request is handled now; that it waits for a disk or a bucket is not."""
    share = SHARE.get()

    def charged() -> T:
        began = time.thread_time()
        try:
            return do(*arguments)
        finally:
            if share is not None:  # on another thread: an addition that is lost harms little
                share.used += time.thread_time() - began

    return await asyncio.to_thread(charged)


async def turn() -> None:
    """Let others have their turn, amid the work for a request: wait where its caller has used more than the cap."""
    share = SHARE.get()
    if share is not None:
        await share.turn()


async def measured(do: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run `do`, and return or raise what it does. Its steps are charged to the caller whose request is handled now."""
    share = SHARE.get()
    return await (do(*arguments) if share is None else Measured(do(*arguments), share))


async def next_of(items: AsyncGenerator[T]) -> T | None:
    """The next item; None at the end. For `measured`."""
    return await anext(items, None)


class CoreWait:
    """For how long the thread that makes this was ready to run and had no core, since others ran there or since the
    processor time that its container may use was used up. Source: Linux's `/proc/thread-self/schedstat`, ns."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another system, or a kernel that does not count it
            self._file = None

    def seconds(self) -> float:
        """Seconds so far; 0 where it is not known."""
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class FairShare:
    """The callers of one gateway. Use it on its event loop."""

    def __init__(self) -> None:
        self.cap: float | None = None
        """Seconds that each caller may use in a second; None: as many as it can."""
        self._late = 0.0
        self._load = 0.0
        self._shares: dict[Hashable, Share] = {}
        self._others = Share(self)
        self._unlike = False
        """Whether there are callers of whom one uses much less than another."""
        self._least = SHARED
        self._swept = time.monotonic()

    def of(self, caller: Hashable) -> Share:
        """A caller's share."""
        share = self._shares.get(caller)
        if share is None:
            share = self._others
            if len(self._shares) < (MOST_CALLERS if is_tenant(caller) else MOST_CALLERS // 2):
                share = self._shares[caller] = Share(self)
        return share

    def note_request(self, caller: Hashable, now: float) -> None:
        """Count a caller as one of the callers from now (monotonic) on, for a while."""
        self.of(caller).last_request_at = now

    def may(self, share: Share, now: float) -> bool:
        """Whether a caller's next request may begin. Without a cap it waits for no line that one has left."""
        return self.cap is None or (not share.line and self._paid(share, now))

    @property
    def behind(self) -> bool:
        """Whether there is a cap."""
        return self.cap is not None

    def wait(self, share: Share) -> asyncio.Future[bool] | None:
        """The place of a request in its caller's line; None: the line is full. It is done once its turn has come, and
        may be set to False meanwhile, by who knows that its client has left."""
        line = share.line
        if len(line) >= MOST_WAITING:
            # Those whose clients have left go first; one stays, so that the line is looked at as before.
            here = [turn for turn in line if not turn.done()] or list(line)[:1]
            line.clear()
            line.extend(here)
            if len(line) >= MOST_WAITING:
                return None
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.append(turn)
        if len(line) == 1:
            self._look_again(share)
        return turn

    def look(self, late: float, load: float, now: float) -> None:
        """Take what the last LOOK_S showed: how late the loop came (s), and the part of the time that it computed. Time
        for which it waited for a core is no part of that."""
        self._late += WEIGHT * (late - self._late)
        self._load += WEIGHT * (load - self._load)
        busy = self._load > BUSY
        behind = busy and self._late > BEHIND_S
        if now - self._swept >= (FIRST_SWEEP_S if behind and self.cap is None else SWEEP_S):
            self._sweep(now)
        if behind and self._unlike:
            if self.cap is None:
                for share in (*self._shares.values(), self._others):
                    share.debt, share.counted, share.at = 0.0, share.used, now
            self.cap = max(self._least, FIRST if self.cap is None else FALLS * self.cap)
        elif self.cap is not None and not (busy and self._unlike and self._late > KEEPS_UP_S):
            higher = RISES * self.cap
            self.cap = higher if higher < NONE else None

    async def run(self) -> None:
        """Look at the loop that runs this, until it is cancelled."""
        core = CoreWait()
        try:
            due, used, waited = time.monotonic() + LOOK_S, time.process_time(), core.seconds()
            while True:
                await asyncio.sleep(due - time.monotonic())
                now, used_now, waited_now = time.monotonic(), time.process_time(), core.seconds()
                had = max(now - due + LOOK_S - (waited_now - waited), used_now - used)
                self.look(max(0.0, now - due), (used_now - used) / had if had else 0.0, now)
                due, used, waited = now + LOOK_S, used_now, waited_now
        finally:
            core.close()

    def _sweep(self, now: float) -> None:
        """See what callers have used since the last time, and forget those that have not asked for a while."""
        tenants, addresses = list[float](), list[float]()
        for caller, share in list(self._shares.items()):
            used = (share.used - share.before) / (now - self._swept)
            if share.open or share.last_request_at >= now - KEPT_S or used > LITTLE_S:
                (tenants if is_tenant(caller) else addresses).append(used)
            else:
                del self._shares[caller]
            share.before = share.used
        if tenants and len(addresses) > len(tenants):
            # Addresses cost nothing: thousands of them do not make the part of a tenant small.
            addresses = [sum(addresses) / len(tenants)] * len(tenants)
        used_by = sorted(tenants + addresses)
        self._least = equal_part(used_by, SHARED)
        self._unlike = len(used_by) > 1 and used_by[0] < LIGHT * self._least
        self._swept = now

    def _paid(self, share: Share, now: float) -> bool:
        """Whether a caller has used no more than the cap."""
        if self.cap is None:
            return True
        paid = self.cap * (now - share.at)
        share.debt = max(-DEPTH_S, share.debt + share.used - share.counted - paid)
        share.counted, share.at = share.used, now
        return self._owed(share) <= 0

    def _owed(self, share: Share) -> float:
        """Seconds that a caller has to pay off. Those that its running requests may use are no more than it may have in
        hand: else many that wait for their tasks, or large ones, would let none of it go on before they end."""
        return -DEPTH_S if self.cap is None else share.debt + min(DEPTH_S, share.running * share.first)

    def _look_again(self, share: Share, begun: int = 0) -> None:
        """Look at a line once its caller will have paid. `begun`: so many of it have just begun; what they use is
        charged later, and others would begin meanwhile."""
        after = (self._owed(share) + begun * share.first) / (self.cap or NONE)
        asyncio.get_running_loop().call_later(min(LATE_S, max(SOON_S, after)), self._next, share)

    def _next(self, share: Share) -> None:
        """Let the next requests of a line begin: as many as its caller may pay."""
        line, begun = share.line, 0
        if self._paid(share, time.monotonic()):
            more = 1 + int(-self._owed(share) / max(share.first, LEAST_S))
            while line and more > 0:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(True)
                    more -= 1
                    begun += 1
        while line and line[0].done():
            line.popleft()
        if line:
            self._look_again(share, begun)
