"""What all routes share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request

from producers.aio import AsyncClient
from producers.gateway.metrics import Metrics
from producers.gateway.prompts import Prompts
from producers.gateway.room import Room
from producers.gateway.settings import GatewaySettings
from producers.gateway.sse import Streams
from producers.gateway.templates import Templates
from producers.readers import ReaderLeases


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
