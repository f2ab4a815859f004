"""`/v1/models`: the models in the store, also while no worker is up."""

from __future__ import annotations

from fastapi import APIRouter, Request

from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import READS, principal_of
from producers.gateway.http.errors import Problem
from producers.gateway.tasks.views import ModelList, ModelView, errors

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", dependencies=READS, response_model=ModelList)
async def listed(request: Request) -> ModelList:
    """List the models that the caller may use."""
    cards = await gateway_of(request).client.models()
    return ModelList(data=[ModelView.of(card) for card in cards if principal_of(request).may_use(card["name"])])


@router.get("/{name:path}", dependencies=READS, response_model=ModelView, responses=errors(404))
async def one(request: Request, name: str) -> ModelView:
    """Get one model. Its name may have slashes."""
    if not principal_of(request).may_use(name):
        message = f"There is no model {shown(name)} that this key may use."
        raise Problem(404, message, code="model_not_found", param="model")
    return ModelView.of(await gateway_of(request).client.card(name))
