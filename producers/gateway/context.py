"""What all routes share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request

from producers.client.aio import AsyncClient
from producers.gateway.admission.limits import Room
from producers.gateway.http.sse import Streams
from producers.gateway.metrics import Metrics
from producers.gateway.settings import GatewaySettings
from producers.gateway.text.prompts import Prompts
from producers.gateway.text.templates import Templates
from producers.sweeper.reader_leases import ReaderLeases


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway's parts, made when its application starts."""

    settings: GatewaySettings
    client: AsyncClient
    prompts: Prompts
    templates: Templates
    readers: ReaderLeases
    room: Room
    metrics: Metrics
    streams: Streams
    large: asyncio.Semaphore
    """Of large results, as many as may be in memory at once."""
    awaited: set[str]
    """Models that no worker has served yet, of those that it waits for to be ready."""


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway
