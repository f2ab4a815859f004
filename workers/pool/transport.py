"""kombu's Redis transport with our own way of taking task messages.

The broadcast channels of remote control and their replies are kombu's, and so is publishing. Where the broker is no
Redis, they are on the store, and tasks are published by the broker's own sender. Task queues are not kombu's: no
BRPOP, no `unacked` hash, no visibility timeout. They are fetched by `Intake`, tied to the worker's incarnation and not
to a connection: a channel that closes, or a broker that restarts, neither returns nor loses what is being worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from celery.worker import state
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as stock
from kombu.utils.json import dumps
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError, NoScriptError, ResponseError

from producers.broker.base import Sender
from producers.broker.redis import keys as broker_keys
from producers.connection.connect import connection_pool
from producers.connection.trouble import trouble
from producers.contract import keys

#: Lets kombu write its tables of queues in a full server, too, so that a worker that starts there serves what waits.
ALLOW_OOM = "#!lua flags=allow-oom\n"
BIND = f"{ALLOW_OOM}for _, key in ipairs(KEYS) do redis.call('SADD', key, ARGV[1]) end"
#: The scheme under which kombu finds this transport, and the transport option that carries its `Link`.
SCHEME = "penstock"
LINK = "penstock_link"


class Arrivals(Protocol):
    """Fetched messages on their way into the event loop."""

    @property
    def queues(self) -> Sequence[str]:
        """The queues that they are fetched from, which kombu must not read."""

    @property
    def fd(self) -> int:
        """Readable while messages wait to be handed over."""

    def attach(self) -> None:
        """The consumer is there: begin to fetch."""

    def hand_over(self, deliver: Callable[[dict[str, Any], str], None]) -> None:
        """Give everything that arrived to `deliver`, with its queue; in the event loop."""


class Owner(Protocol):
    """Knows who keeps a delivery, by its UUID, which is kombu's tag."""

    def ack(self, uuid: str) -> None:
        """Celery acknowledges it."""

    def reject(self, uuid: str, requeue: bool) -> None:
        """Celery refuses it."""

    def forget(self, uuid: str) -> None:
        """The channel has closed before anybody took it up."""


@dataclass(frozen=True, slots=True, repr=False)
class Link:
    """The worker's parts that the transport uses. `sender`: takes published tasks, if the broker is no Redis."""

    arrivals: Arrivals
    owner: Owner
    sender: Sender | None
    control_url: str

    def __json__(self) -> str:
        """The form in which `inspect stats` and `conf` show the transport's options, of which this is one."""
        return ", ".join(self.arrivals.queues)

    __repr__ = __json__


class QoS(stock.QoS):
    """Acknowledges through the owner, who knows who keeps a delivery."""

    def append(self, message: Any, delivery_tag: str) -> None:
        virtual.QoS.append(self, message, delivery_tag)  # FETCH has entered it in flight

    def ack(self, delivery_tag: str) -> None:
        self.channel.link.owner.ack(delivery_tag)
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.link.owner.reject(delivery_tag, requeue)
        virtual.QoS.ack(self, delivery_tag)

    def forget(self, delivery_tag: str) -> None:
        """Drop a message that was not taken up, and never will be acknowledged here."""
        self._delivered.pop(delivery_tag, None)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: leases and REAP bring back what a dead worker held."""

    def restore_unacked(self, client: Any = None) -> None:
        """Gives back what no pool has taken up when the channel closes, to the front of its list."""
        self._flush()
        for tag in list(self._delivered):
            self.channel.link.owner.forget(tag)
        self._delivered.clear()

    def restore_unacked_once(self, stderr: Any = None) -> None:
        # kombu 5.7.0's own dies with an AttributeError when the connection was lost before the channel is closed
        self._on_collect.cancel()
        if not getattr(self._delivered, "restored", False):
            self.restore_unacked()
            self._delivered.restored = True


class Channel(stock.Channel):
    """Task queues go to the intake; whatever is bound to a fanout exchange stays kombu's."""

    QoS = QoS
    priority_steps = sorted(priority for _, priority in keys.TIERS.values())

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        # Kept: Celery acknowledges on this channel also when it is closed, and then it has no connection.
        self.link: Link = connection.client.transport_options[LINK]
        super().__init__(connection, **kwargs)

    @cached_property
    def _refresh_binding(self) -> Any:
        return self._create_client().register_script(ALLOW_OOM + stock.REFRESH_BINDING)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        if queue in self._expires or self.typeof(exchange).type == "fanout":
            super()._queue_bind(exchange, routing_key, pattern, queue)
            return
        tables = (self.keyprefix_queue % (exchange,), self.keyprefix_binding_permanent % (exchange,))
        with self.conn_or_acquire() as client:
            client.eval(BIND, len(tables), *tables, self.sep.join([routing_key or "", pattern or "", queue or ""]))

    def _get_pool(self, asynchronous: bool = False) -> Any:
        """Returns our connection pool, with its time limits, and with Sentinels if they are configured."""
        params = self._connparams(asynchronous)
        self.keyprefix_fanout: str = self.keyprefix_fanout.format(db=params["db"])
        channel = self

        class Connection(AbstractConnection):
            def read_response(self, *args: Any, **options: Any) -> Any:
                tcp: Any = super()
                try:
                    return tcp.read_response(*args, **options)
                except NoScriptError:
                    raise  # kombu sends the script then
                except ResponseError as exc:
                    if trouble(exc) is None:
                        raise
                    # A full or read-only server: Celery's consumer would die of it, but connects again after this.
                    raise ConnectionError(str(exc)) from exc

            def disconnect(self, *args: Any, **options: Any) -> None:
                tcp: Any = super()
                tcp.disconnect(*args, **options)
                if asynchronous and channel._registered:
                    channel._on_connection_disconnect(self)

        return connection_pool(self.link.control_url, Connection)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        """Sends a task to the broker, an answer of remote control to this server."""
        sender = self.link.sender
        if sender is None or "task" not in message["headers"]:
            super()._put(queue, message, **kwargs)
        else:
            sender.put(queue, keys.tier_of(message["properties"].get("priority")), dumps(message))

    def _q_for_pri(self, queue: str, pri: int) -> str:
        # kombu's `sep` also stands in the binding tables, which plain senders read and write: that one stays as it is
        step = self.priority(pri)
        return f"{queue}{broker_keys.SEP}{step}" if step else queue

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, *args: Any, **kwargs: Any
    ) -> Any:
        answer = super().basic_consume(queue, no_ack, callback, consumer_tag, *args, **kwargs)
        if queue in self.link.arrivals.queues:
            self._active_queues.remove(queue)  # or the poller would send a BRPOP for it
            self._reset_cycle()
            self.link.arrivals.attach()
        return answer


class Transport(stock.Transport):
    """`penstock://...`: only inside a worker, which passes its `Link` as a transport option."""

    Channel = Channel

    def _deliver(self, message: dict[str, Any], queue: str) -> None:
        try:
            super()._deliver(message, queue)
        except Exception:
            tag = message["properties"]["delivery_tag"]
            for channel in self.channels:
                channel.qos.forget(tag)
            request = state.requests.get(message["headers"]["id"])
            if request is not None and request.message.delivery_tag == tag:  # it had come as far as Celery's books
                state.task_ready(request)
            raise

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        super().register_with_event_loop(connection, loop)
        arrivals: Arrivals = self.client.transport_options[LINK].arrivals
        loop.add_reader(arrivals.fd, arrivals.hand_over, self._deliver)


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"
