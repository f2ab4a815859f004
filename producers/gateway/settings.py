"""Settings of a gateway."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final, Literal

from producers.connection.local import FILES_DIR
from producers.store.access.api_keys import Limits
from producers.store.protocol import READER_LEASE_S

#: Open files reserved for other things than callers' connections: store, broker, logs.
OTHER_FILES: Final = 128


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of `penstock gateway`. Times are seconds, sizes bytes."""

    broker: str
    store: str
    host: str = "127.0.0.1"
    port: int = 8000
    auth: Literal["keys", "none"] = "none"
    """Whether requests need a key (`producers.store.access.api_keys`), or callers name their tenant themselves."""
    insecure: bool = False
    """Whether, without keys, requests may name this gateway as they like (`producers.gateway.http.authorization`)."""
    max_body: int = 4 << 20
    """Largest request body; a larger one is refused with 413."""
    max_file: int = 2 << 30
    """Largest uploaded file; a larger one is refused with 413."""
    max_file_bytes: int = 100 << 30
    """Most bytes of one tenant's files. 0 here and in the next ones: any number; a tenant's own limit goes before it
    (`producers.store.access.api_keys`)."""
    max_files: int = 10_000
    """Most files of one tenant."""
    max_batches: int = 100
    """Most batches of one tenant that have not ended."""
    max_endpoints: int = 20
    """Most webhook endpoints of one tenant; those without a tenant count as one tenant's."""
    max_task_bytes: int = 4 << 30
    """Most bytes of one tenant's tasks, responses and results in the store."""
    max_idempotency_keys: int = 1_000_000
    """Most idempotency keys of one tenant that begin within a day."""
    files_dir: str = str(FILES_DIR)
    """The folder, or the bucket's URL, for files' content, which all gateways and sweepers share."""
    files_redirect: bool = False
    """Whether downloads go to the bucket of `files_dir`, by a signed URL, instead of through the gateway."""
    patience: float = 4.0
    """Time for which a failing connection to store or broker is retried before the caller gets 503."""
    heartbeat: float = 10.0
    """Silence after which a stream gets a comment, so that proxies and clients see that it is alive."""
    stall: float = 60.0
    """Time after which a reader that takes no data is dropped; it may resume at its position."""
    receive: float = 60.0
    """Time limit for receiving a whole request; then its connection is closed."""
    connections: int = 8192
    """Most open connections, if the limit of open files allows. Idle ones make room for more; if none is, those get
    503."""
    connections_per_address: int | None = None
    """Most open connections of one address, of IPv6 of 64 bits; 0: any number; None: a quarter of all. Loopback and
    `proxy_headers` may have any number."""
    max_streams: int = 4096
    """Most open streams (`producers.gateway.http.sse`); 0: as many as leave connections to other requests. Further
    ones get 503."""
    max_streams_per_tenant: int = 1024
    """Most open streams of one tenant, or of one address where no keys are asked for; 0: half of all. Further ones get
    429."""
    drain: float = 30.0
    """Time for which open requests and streams may go on after SIGTERM."""
    reader_lease: float = READER_LEASE_S
    """Silence of a gateway after which its waiting requests' tasks are cancelled."""
    max_queued: int = 50_000
    """Most waiting tasks of a model version, all tiers together; 0: any number. More are refused with 429; lower tiers
    are refused earlier."""
    max_queued_per_tenant: int = 25_000
    """Most waiting tasks of one tenant, in all; 0: any number."""
    max_queued_in_all: int = 100_000
    """Most waiting tasks, as `max_queued`, of all models."""
    max_wait: float = 0.0
    """Expected wait of interactive tasks that counts as full (`producers.store.waiting`); 0: any."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers: `https://chat.example.org`, or `*`. Empty: none."""
    webhook_allow: tuple[str, ...] = ()
    """Networks (CIDR) whose addresses webhooks may name though they are not public, by any scheme and port."""
    prices: str | None = None
    """A file with prices (`producers.store.usage.prices`), with which usage has its cost."""
    proxy_headers: tuple[str, ...] = ()
    """Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto count, or `*`. Empty: none."""
    awaited: tuple[str, ...] = ()
    """Models that must be published, or have been served, before the gateway reports itself ready."""
    process: str = ""
    """This process's name among several on one socket, a label of its own figures; empty: it is the only one."""
    sweep: bool = True
    """Whether this process also sends recorded but unsent tasks, and cancels tasks of lost readers."""

    @property
    def kept(self) -> Limits:
        """The limits of what is kept for a tenant that has none of its own."""
        return Limits(
            max_file_bytes=self.max_file_bytes or None,
            max_files=self.max_files or None,
            max_batches=self.max_batches or None,
            max_endpoints=self.max_endpoints or None,
            max_task_bytes=self.max_task_bytes or None,
            max_idempotency_keys=self.max_idempotency_keys or None,
        )

    @property
    def most_connections(self) -> int:
        """`connections`, as far as the limit of open files allows it."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(self.connections, files - OTHER_FILES))
