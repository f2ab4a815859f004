"""Adds up usage, grouped as a reader requests, and shows it as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from redis.asyncio import Redis

from producers.store.usage.ledger import COUNTS, OVERHEAD, STATUSES, Group, usage_between
from producers.store.usage.prices import Prices

#: Most reports of a tenant that wait for another of it.
WAITING: Final = 4
#: Fields by which usage may be grouped.
PARTS: Final = (*Group._fields, "day")
#: Count -> its name in a report.
NAMES: Final = {
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "output": "output_tokens",
    "discarded": "discarded_tokens",
    "again": "recomputed_tokens",
    "ms": "seconds",
    "engine": "engine_seconds",
}
#: The latest time (unix s) that a row may have, the end of the year 9999.
_LATEST: Final = 253_402_300_800
_ENGINE: Final = COUNTS.index("engine")
_ENERGY: Final = COUNTS.index("energy")
#: Count -> how many of it are a second.
_SECOND: Final = {"ms": 1000, "engine": 1_000_000}


class TooManyReports(Exception):
    """The tenant's limit of waiting reports is reached."""


class Reports:
    """Lets one report of a tenant be made at a time in this process, and WAITING more wait: each reads the latest rows
    of all tenants, so that who asks again and again would keep the store and the process busy. Use it from one event
    loop."""

    def __init__(self) -> None:
        self._tenants: dict[str | None, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncGenerator[None]:
        """Wait for the tenant's turn; None is who sees all. Raises TooManyReports."""
        lock, asking = self._tenants.setdefault(tenant, (asyncio.Lock(), []))
        if len(asking) > WAITING:
            raise TooManyReports
        asking.append(None)
        try:
            async with lock:
                yield
        finally:
            asking.pop()
            if not asking:
                del self._tenants[tenant]


class BadSpan(ValueError):
    """A time, or a part to group by, that cannot be used, in words. `param`: `by`, `since` or `until`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True)
class Line:
    """One line of a report. `cost`: of what has a price; `unpriced`: tasks without one. `device_cost`: of the engine's
    time, where the table has the device's price; `overhead_cost`, `overhead_joules`: of the overhead. `joules`: what
    workers measured, else the watts of the table in the engine's time."""

    counts: list[int] = field(default_factory=lambda: [0] * len(COUNTS))
    cost: Decimal = Decimal(0)
    unpriced: int = 0
    device_cost: Decimal = Decimal(0)
    joules: Decimal = Decimal(0)
    overhead: dict[str, Decimal] = field(default_factory=lambda: dict.fromkeys(OVERHEAD, Decimal(0)))
    """Its share of workers' time without tasks, by state (microseconds)."""
    overhead_cost: Decimal = Decimal(0)
    overhead_joules: Decimal = Decimal(0)


@dataclass(frozen=True, slots=True)
class Report:
    """The usage from `since` until before `until` (unix s), in lines by the values of the parts `by`."""

    since: int
    until: int
    by: tuple[str, ...]
    lines: dict[tuple[str, ...], Line]
    currency: str | None
    devices: bool = False
    """Whether the table has prices of devices."""
    overhead: bool = False
    """Whether lines have their share of workers' time without tasks, which is the operator's affair."""

    def rows(self) -> list[dict[str, Any]]:
        """The lines, in order, each as a flat object."""
        return [
            dict(zip(self.by, name, strict=True)) | self._numbers(line) for name, line in sorted(self.lines.items())
        ]

    def csv(self) -> str:
        """The lines with a head; one line at least without `by`."""
        out = io.StringIO()
        writer = csv.DictWriter(out, [*self.by, *self._numbers(Line())], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return out.getvalue()

    def _numbers(self, line: Line) -> dict[str, Any]:
        numbers: dict[str, Any] = {"tasks": sum(line.counts[: len(STATUSES)])}
        counts = zip(COUNTS, line.counts, strict=True)
        numbers |= {NAMES.get(name, name): count for name, count in counts if name != "energy"}
        numbers |= {NAMES[name]: line.counts[COUNTS.index(name)] / per_second for name, per_second in _SECOND.items()}
        if self.overhead:
            numbers |= {f"{state}_seconds": round(float(us) / 1e6, 6) for state, us in line.overhead.items()}
        if self.overhead and (self.devices or any(each.joules or each.overhead_joules for each in self.lines.values())):
            numbers["joules"] = round(float(line.joules), 3)
            numbers["overhead_joules"] = round(float(line.overhead_joules), 3)
        if self.devices:
            numbers |= {"device_cost": _plain(line.device_cost), "overhead_cost": _plain(line.overhead_cost)}
        if self.currency is not None:
            numbers |= {"cost": _plain(line.cost), "currency": self.currency}
            numbers["unpriced_tasks"] = line.unpriced
        return numbers


def _plain(amount: Decimal) -> str:
    """A sum of money, without an exponent."""
    return format(amount.normalize(), "f")


async def report(
    store: Redis,
    since: int,
    until: int,
    by: tuple[str, ...] = (),
    *,
    tenant: str | None = None,
    prices: Prices | None = None,
) -> Report:
    """`tenant`: its usage alone, without what devices cost, which is the operator's affair. Raises
    redis.exceptions.RedisError or OSError.

    Where `until` is yet to come, nothing is left out as too late: the store's clock may have been ahead.
    """
    lines: dict[tuple[str, ...], Line] = {} if by else {(): Line()}
    shares = _Shares()
    for start, group, counts in await usage_between(store, since, _LATEST if until > time.time() else until, tenant):
        values = group._asdict() | {"day": datetime.fromtimestamp(start, UTC).date().isoformat()}
        name = tuple(values[part] for part in by)
        day = values["day"] if "day" in by else ""
        if group.tier in OVERHEAD:
            if tenant is None:
                without = tuple(values[part] if part in ("day", "model") else "" for part in by)
                shares.overhead(day, group, (counts[_ENGINE], counts[_ENERGY]), without)
            continue
        shares.engine(day, group.model, name, counts[_ENGINE])
        line = lines.setdefault(name, Line())
        line.counts = [had + more for had, more in zip(line.counts, counts, strict=True)]
        cost = None if prices is None else prices.of(group, counts)
        line.cost += cost or 0
        line.unpriced += sum(counts[: len(STATUSES)]) if cost is None else 0
        if prices is not None:
            line.device_cost += prices.device_cost(group.model, counts[_ENGINE]) or 0
        if energy_uj := counts[_ENERGY]:
            line.joules += Decimal(energy_uj) / 1_000_000
        elif prices is not None:
            line.joules += prices.joules(group.model, counts[_ENGINE]) or 0
    shares.add_to(lines, prices)
    devices = prices is not None and bool(prices.devices) and tenant is None
    currency = None if prices is None else prices.currency
    return Report(since, until, by, lines, currency, devices, overhead=tenant is None)


class _Shares:
    """Divides the time of a model's workers without tasks among the lines that used the model, by their engine time. If
    none did, it has a line of its own."""

    def __init__(self) -> None:
        #: Day (empty: all), model -> line -> engine time (us).
        self._engine: dict[tuple[str, str], dict[tuple[str, ...], int]] = {}
        #: The same, and the state -> time (us), energy (uJ), and the line where nobody used the model.
        self._overhead: dict[tuple[str, str, str], tuple[int, int, tuple[str, ...]]] = {}

    def engine(self, day: str, model: str, line: tuple[str, ...], us: int) -> None:
        used = self._engine.setdefault((day, model), {})
        used[line] = used.get(line, 0) + us

    def overhead(self, day: str, group: Group, more: tuple[int, int], line: tuple[str, ...]) -> None:
        """`more`: time (us) and energy (uJ)."""
        us, uj, _ = self._overhead.get((day, group.model, group.tier), (0, 0, line))
        self._overhead[day, group.model, group.tier] = us + more[0], uj + more[1], line

    def add_to(self, lines: dict[tuple[str, ...], Line], prices: Prices | None) -> None:
        for (day, model, state), (us, uj, alone) in self._overhead.items():
            used = self._engine.get((day, model), {})
            whole = sum(used.values())
            for name, engine in used.items() if whole else [(alone, 1)]:
                share = Decimal(us) * engine / (whole or 1)
                line = lines.setdefault(name, Line())
                line.overhead[state] += share
                line.overhead_joules += Decimal(uj) * engine / (whole or 1) / 1_000_000
                line.overhead_cost += (None if prices is None else prices.device_cost(model, share)) or 0


def read_by(values: Sequence[str]) -> tuple[str, ...]:
    """The parts to group by, in `key,model` or one at a time. Raises BadSpan."""
    parts = [part for value in values for part in value.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise BadSpan("by", f"by is {part!r}; usage is grouped by {', '.join(PARTS)}")
    return tuple(dict.fromkeys(parts))


def read_span(since: str | None, until: str | None) -> tuple[int, int]:
    """Unix s, rounded down to whole hours, of two dates or times (ISO 8601, UTC unless they say otherwise). `until` is
    not included, but for a date its whole day is. Unset: the beginning of this month, and the next hour. Raises
    BadSpan."""
    now = datetime.now(UTC)
    first = _time("since", since) if since else now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    last = _time("until", until, whole=True) if until else now + timedelta(hours=1)
    if first > last:
        raise BadSpan("since", f"since ({first:%Y-%m-%dT%H:%M}) is after until ({last:%Y-%m-%dT%H:%M})")
    start, end = (int(moment.timestamp()) // 3600 * 3600 for moment in (first, last))
    return start, end


def _time(name: str, text: str, *, whole: bool = False) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
        if whole and _is_date(text):
            moment += timedelta(days=1)
        moment.timestamp()
    except (ValueError, OverflowError):
        raise BadSpan(name, f"{name} is {text[:40]!r}; it must be a date or time such as 2026-11-01") from None
    return moment


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
