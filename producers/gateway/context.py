"""The parts of a gateway that all routes share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.leases import ReaderLeases
from producers.connection.turns import Turns
from producers.gateway.admission.authentication import Callers
from producers.gateway.admission.limits import Accounts, Admission, Destinations
from producers.gateway.estimates import Estimates
from producers.gateway.executor import Executor
from producers.gateway.http.request_body import BodyRoom
from producers.gateway.http.sse import Streams
from producers.gateway.metrics import Metrics
from producers.gateway.readiness_checks import Awaited, Reach
from producers.gateway.samples import Samples
from producers.gateway.settings import GatewaySettings
from producers.gateway.text.forms import Forms
from producers.gateway.text.prompts import Prompts, Templates
from producers.gateway.wait_reasons import WaitReasons
from producers.store.blobs import Blobs
from producers.store.usage.prices import Prices
from producers.store.usage.report import Reports


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway's parts, built when its application starts."""

    settings: GatewaySettings
    client: AsyncClient
    prompts: Prompts
    templates: Templates
    forms: Forms
    blobs: Blobs
    reach: Reach
    """Whether `blobs` can be used."""
    readers: ReaderLeases
    callers: Callers | None
    """Finds who asks; None where no keys are asked for."""
    accounts: Accounts
    admission: Admission
    destinations: Destinations
    metrics: Metrics
    streams: Streams
    bodies: Executor
    """Unpacks and parses large bodies."""
    body_room: BodyRoom
    """Room for large bodies that come in, and results that go out."""
    large: Turns
    """Permits for large results in memory."""
    file_pieces: Turns
    """Permits to read or write a piece of a file, on a thread."""
    reports: Reports
    """Turns of reports of usage."""
    prices: Prices | None
    """What tokens cost; None where that is not said."""
    awaited: Awaited
    samples: Samples
    """Reads the system for all who look at it."""
    waits: WaitReasons
    """Tells callers what their tasks wait for."""
    estimates: Estimates
    """Tells callers when their tasks end."""


def gateway_of(request: HTTPConnection) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway
