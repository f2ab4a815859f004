"""The process that takes due rows from the outbox and delivers them, many at once, within each receiver's limits.

A target is an endpoint's present URL and secrets, or those of a task's own webhook.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, once, persistently
from producers.client.wake import wake
from producers.connection.addresses import networks
from producers.connection.connect import SILENT_S as ANSWER_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call
from producers.connection.trouble import fault
from producers.contract.sealing import unseal
from producers.contract.webhook import Destination
from producers.errors import SecretUnreadable, shown
from producers.store import endpoints, epoch, outbox
from producers.store.access.audit import Change
from producers.store.endpoints import TEST_PREFIX, Endpoint, Secrets
from producers.store.outbox import Attempt, Row
from producers.tracing.export import Tracer, tracer
from workers.runtime.health import Health
from workers.runtime.signals import on_stop_signal
from workers.webhooks.limits import QUICK, SLOW, Limits, Visit
from workers.webhooks.sender import Outcome, OwnTrouble, Sender, body_of, headers_of, next_delay
from workers.webhooks.try_spans import TrySpans


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, and the secrets to sign with."""

    url: str
    secrets: Sequence[str]
    whose: str
    """The endpoint or the tenant: on a host that many share, each has limits of its own."""

    @property
    def receiver(self) -> str:
        """The name by which limits are counted: scheme, host, port, and its owner."""
        try:
            origin = Destination.parse(self.url).origin
        except ValueError:  # a producer of another version wrote it: the try fails with the reason
            origin = self.url
        return f"{origin} {self.whose}"


async def targets(store: Redis, rows: Sequence[Row]) -> list[Target | SecretUnreadable | str]:
    """A target for each row, or the reason why it has none: for good, or until this process has the secret's key.

    Raises redis.exceptions.RedisError or OSError.
    """
    named = await endpoints.get_many(store, list({row.endpoint for row in rows if row.endpoint is not None}))
    tenants = {row.tenant for row in rows if row.endpoint is None and row.secret is None}
    secrets = {tenant: await _of_tenant(store, tenant) for tenant in tenants}
    results: list[Target | SecretUnreadable | str] = []
    for row in rows:
        try:
            results.append(_of_task(row, secrets) if row.endpoint is None else _of_endpoint(named.get(row.endpoint)))
        except SecretUnreadable as error:
            results.append(error)
    return results


def _of_endpoint(endpoint: Endpoint | None) -> Target | str:
    if endpoint is None:
        return "the endpoint was deleted, or cannot be read"
    if not endpoint.enabled:
        return f"the endpoint is disabled: {endpoint.disabled_because}"
    return Target(endpoint.url, endpoint.secrets.signing(time.time()), endpoint.id)


async def _of_tenant(store: Redis, tenant: str | None) -> Secrets | SecretUnreadable | None:
    """A tenant's secrets; None if what is stored cannot be read."""
    try:
        return await endpoints.own_secrets(store, tenant)
    except SecretUnreadable as error:
        return error
    except (ValueError, TypeError, KeyError):
        return None


def _of_task(row: Row, secrets: Mapping[str | None, Secrets | SecretUnreadable | None]) -> Target | str:
    signing: Sequence[str] = ()
    if row.secret is not None:
        signing = [unseal(row.secret)]
    elif isinstance(tenant_secrets := secrets[row.tenant], SecretUnreadable):
        raise tenant_secrets
    elif tenant_secrets is not None:
        signing = tenant_secrets.signing(time.time())
    return Target(row.url, signing, f"of {row.tenant or ''}") if signing else "the tenant's secret cannot be read"


log = logging.getLogger(__name__)
#: Most rows that one TAKE leases.
BATCH: Final = 128
#: Longest time (s) between two looks at the store: rows become due silently, and a wake-up may be lost.
LOOK_S: Final = 1.0
#: Time (s) for which storing a try's end is repeated while the store is away. After that the row's lease lapses.
PATIENCE_S: Final = 8.0
#: Time (s) after which a row is tried again for which this process had no file descriptor, memory or port.
OWN_TROUBLE_S: Final = 5.0
#: Time (s) after which a row is tried again whose secret this process cannot read.
NO_KEY_S: Final = 30.0
#: Time (s) for which the store took no call, after which the process is not ready.
SILENT_S: Final = 10.0
#: Time (s) before each try, counted from the one before it; after the last there is none.
SCHEDULE: Final = (0.0, 5.0, 300.0, 1800.0, *(hours * 3600.0 for hours in (2, 5, 10, 14, 20, 24)))
#: Open files that the tries, connections kept for the next ones, and all else may need.
FILES: Final = 4 * (QUICK + SLOW)


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Settings of `penstock webhooks run`. Times are seconds."""

    store: str
    allowed: tuple[str, ...] = ()
    """Networks (CIDR) whose addresses may be called though they are not public, by any scheme and port."""
    schedule: tuple[float, ...] = SCHEDULE
    timeout: float = 20.0
    """Longest try, from the name's resolution to the answer."""
    lease: float = 60.0
    """Time after which another process takes a killed one's rows; longer than any try."""
    drain: float = 25.0
    """Time that tries may go on after SIGTERM; the rest is given back untried."""
    health_port: int | None = None
    """Port of /livez and /readyz; 0: any free port; None: no port."""


class Deliverer:
    """Delivers until `stop`. `due`: set it when rows may have become due."""

    given_up = ""

    def __init__(self, client: AsyncClient, settings: WebhookSettings, tracer: Tracer | None = None) -> None:
        """`tracer` sends a span of each try; None: traces are off. Raises ValueError for a bad network in
        `settings.allowed`."""
        self._client, self._settings = client, settings
        self._spans = None if tracer is None else TrySpans(client, tracer)
        self._sender = Sender(networks(settings.allowed), settings.timeout)
        self._limits = Limits()
        self._tries: set[asyncio.Task[None]] = set()
        self.stopping = False
        self._hastened = asyncio.Event()
        self.due = asyncio.Event()
        self._heard_at = time.monotonic()
        self._fault = "the store does not answer"
        """The reason of the last round that failed."""
        self._unreadable, self._unreadable_at = "", float("-inf")
        """Why a secret could not be read lately, and when."""

    async def run(self) -> None:
        """Take and deliver, until `stop`; then let running tries end for the drain's time, and give the rest back."""
        try:
            while not self.stopping:
                try:
                    pause = await self._round()
                except FAILURES as error:
                    self._fault = fault("the store", error)
                    warn_throttled(log, "cannot take rows from the store, trying again: %s", error)
                    pause = LOOK_S
                except Exception:  # rows that were taken are due again when their lease ends; others must not wait
                    log.exception("a round failed here, going on")
                    pause = LOOK_S
                await self._pause(pause)
            await self._drain()
        finally:
            await self._sender.close()

    def unready(self) -> list[str]:
        """The reasons why it is not ready, as in `workers.runtime.health.Watched`.

        Without free places it takes no rows, so that the store's silence means nothing.
        """
        silent = time.monotonic() - self._heard_at > SILENT_S and self._limits.free > 0
        no_key = time.monotonic() - self._unreadable_at < 2 * NO_KEY_S
        return (
            ["it drains"] * self.stopping
            + [f"no rows were taken for {SILENT_S:g} s: {self._fault}"] * silent
            + [f"deliveries wait: {self._unreadable}"] * no_key
        )

    def stop(self) -> None:
        """End; a second call gives back at once what is not delivered yet."""
        if self.stopping:
            self._hastened.set()
        self.stopping = True
        self.due.set()
        self._limits.room.set()

    async def _round(self) -> float:
        """Take rows for the places that are free, and begin to deliver them. Returns the time (s) until the next."""
        n = min(BATCH, self._limits.free)
        if n == 0:
            self._limits.room.clear()
            await self._limits.room.wait()
            return 0.0
        self.due.clear()
        holder = uuid.uuid4().hex
        leased = outbox.read_take(
            await self._client.run(once(outbox.take(holder, n, int(self._settings.lease * 1000))))
        )
        self._heard_at = time.monotonic()
        if leased.rows:
            await self._begin(leased.rows, holder)
        if len(leased.rows) == n:
            return 0.0
        return LOOK_S if leased.next_ms is None else min(LOOK_S, leased.next_ms / 1000)

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0.0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self.due.wait()
        except TimeoutError:
            pass

    async def _begin(self, rows: Sequence[Row], holder: str) -> None:
        async with asyncio.timeout(ANSWER_S):
            places = await targets(self._client.store, rows)
        calls: list[Call] = []
        for row, target in zip(rows, places, strict=True):
            if isinstance(target, SecretUnreadable):
                calls.append(self._without_key(row, holder, target))
            elif isinstance(target, str):
                calls.append(outbox.dead(row, holder, Attempt(int(time.time()), 0, error=target)))
            elif (visit := self._limits.visit(target.receiver)) is not None:
                task = asyncio.create_task(self._deliver(row, holder, target, visit))
                self._tries.add(task)
                task.add_done_callback(self._tries.discard)
            else:
                delay = int(1000 * self._limits.put_off_s(target.receiver)) + 1
                calls.append(outbox.retry(row, holder, delay))
        await asyncio.gather(*(self._client.run(once(call)) for call in calls))

    def _without_key(self, row: Row, holder: str, error: SecretUnreadable) -> Call:
        """The call that puts a row off, untried: it is sent signed, or not at all. A test does not wait for the key."""
        self._unreadable, self._unreadable_at = str(error), time.monotonic()
        warn_throttled(log, "deliveries wait: %s", error)
        if row.webhook_id.startswith(TEST_PREFIX):
            return outbox.dead(row, holder, Attempt(int(time.time()), 0, error=str(error)))
        return outbox.retry(row, holder, int(NO_KEY_S * 1000))

    async def _deliver(self, row: Row, holder: str, target: Target, visit: Visit) -> None:
        outcome: Outcome | None = None
        begin = time.time()
        try:
            body = body_of(row)
            outcome = await self._sender.send(target.url, headers_of(row, body, target.secrets), body)
        except asyncio.CancelledError:  # the drain is over
            await self._store_end(outbox.retry(row, holder, 0))
            raise
        except OwnTrouble as error:
            warn_throttled(log, "cannot connect for want of this machine's own means: %s", error)
            await self._store_end(outbox.retry(row, holder, int(OWN_TROUBLE_S * 1000)))
            return
        except Exception as error:  # a fault of ours must not make a row that is tried for ever
            log.exception("delivery %s failed here", row.name)
            outcome = Outcome(Attempt(int(time.time()), 0, error=f"{type(error).__name__} in the webhooks process"))
        finally:
            visit.leave(None if outcome is None else outcome.well)
        await self._store_end(await self._ended(row, holder, target, outcome))
        if self._spans is not None:  # last: no trace may make a delivery that arrived be sent again
            await self._spans.send(row, target.url, begin, outcome.attempt)

    async def _ended(self, row: Row, holder: str, target: Target, outcome: Outcome) -> Call:
        """The call that stores the end of a try."""
        if outcome.delivered:
            return outbox.delivered(row, holder, outcome.attempt)
        result = shown(outcome.attempt.status or outcome.attempt.error)  # others' text: kept to one line of the log
        log.info("delivery %s to %s failed, try %d: %s", row.name, shown(target.receiver), row.tries + 1, result)
        delay = next_delay(self._settings.schedule, row.tries + 1, outcome.retry_after_s)
        if outcome.gone:
            delay = None
            await self._disable(row.endpoint, target.url)
        if delay is None or row.webhook_id.startswith(TEST_PREFIX):
            return outbox.dead(row, holder, outcome.attempt)
        return outbox.retry(row, holder, int(delay * 1000), outcome.attempt)

    async def _disable(self, endpoint_id: str | None, url: str) -> None:
        if endpoint_id is None:
            return

        def disabled(endpoint: Endpoint) -> Endpoint:
            if endpoint.url != url:  # it has moved meanwhile
                return endpoint
            return replace(
                endpoint, enabled=False, disabled_because="it answered 410 Gone", updated_at=int(time.time())
            )

        try:
            audit = Change("webhooks", "endpoint.disable", endpoint_id)
            await endpoints.change(self._client.store, endpoint_id, disabled, audit)
        except FAILURES as error:  # its next delivery gets the same answer
            warn_throttled(log, "an endpoint that answered 410 is not disabled yet: %s", error)

    async def _store_end(self, call: Call) -> None:
        """Send the end of a try. If the store stays away, the row is due again when its lease ends."""
        try:
            await self._client.run(persistently(call, PATIENCE_S))
        except FAILURES as error:
            warn_throttled(log, "the end of a delivery could not be stored, it will be sent again: %s", error)

    async def _drain(self) -> None:
        if self._tries:
            log.info("draining: %d deliveries are on their way", len(self._tries))
            hastened = asyncio.create_task(self._hastened.wait())
            all_ended = asyncio.create_task(asyncio.wait(set(self._tries)))
            await asyncio.wait((all_ended, hastened), timeout=self._settings.drain, return_when=asyncio.FIRST_COMPLETED)
            hastened.cancel()
            unfinished = set(self._tries)
            for task in unfinished:
                task.cancel()
            if unfinished:
                log.info("giving %d deliveries back", len(unfinished))
            await all_ended


async def run(settings: WebhookSettings) -> None:
    """Deliver until SIGTERM or SIGINT; a second signal gives all rows back at once.

    Raises ValueError for a bad URL or network, or traces that cannot be sent as the environment says, and
    workers.errors.Refused for a port that is taken.
    """
    _allow_files()
    spans = tracer("webhooks")
    health = Health(settings.health_port)
    async with AsyncClient(settings.store, settings.store) as client:
        deliverer = Deliverer(client, settings, spans)
        health.serve(deliverer, asyncio.get_running_loop())
        on_stop_signal(deliverer.stop)
        beside = [
            asyncio.create_task(wake(client.store, deliverer.due), name="wake"),
            asyncio.create_task(epoch.watch(client.store, deliverer.stop), name="watch the epoch"),
        ]
        log.info("delivering webhooks; not public and allowed: %s", ", ".join(settings.allowed) or "nothing")
        try:
            await deliverer.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            if spans is not None:
                await asyncio.to_thread(spans.close)


def _allow_files() -> None:
    """Raise the limit of open files as far as is allowed and of use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
