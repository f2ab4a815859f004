"""`/v1/webhook_endpoints`, as OpenAI's clients call it: places that hear of what becomes of tasks and batches.

    fields (URL, event types) -> Destinations: may it be called? -> producers.store.endpoints
    /test puts a row into the outbox and waits until a webhooks process has tried it

Deliveries are made by `workers.webhooks`.
"""

from producers.gateway.webhooks.routes import router

__all__ = ["router"]
