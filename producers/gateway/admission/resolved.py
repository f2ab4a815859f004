"""The model of a request, resolved once: its prompt is made, its limits are checked and its tasks are submitted for one
version, also while a rollout switches to another."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.submission import ResolvedModel


async def resolve(connection: HTTPConnection, client: AsyncClient, model: str) -> ResolvedModel:
    """A request's model, as this request found it first. Raises as `AsyncClient.resolve`."""
    state = connection.scope["state"]
    resolved: dict[str, ResolvedModel] = state.setdefault("models", {})
    if model not in resolved:
        resolved[model] = await client.resolve(model)
    return resolved[model]
