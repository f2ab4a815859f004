"""`/v1/models`: the models in the store, also while no worker is up."""

from __future__ import annotations

from fastapi import APIRouter, Request

from producers.gateway.context import gateway_of
from producers.gateway.tasks.views import ModelList, ModelView, errors

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_model=ModelList)
async def listed(request: Request) -> ModelList:
    """List all models."""
    return ModelList(data=[ModelView.of(card) for card in await gateway_of(request).client.models()])


@router.get("/{name:path}", response_model=ModelView, responses=errors(404))
async def one(request: Request, name: str) -> ModelView:
    """Get one model. Its name may have slashes."""
    return ModelView.of(await gateway_of(request).client.card(name))
