"""The HTTP gateway: FastAPI in front of `producers.AsyncClient`. It validates and tokenises, and never generates.

    POST /v1/tasks -> edge (id, count) -> body (limits) -> Task -> prompts (token ids) -> AsyncClient.submit -> 202
    GET  /v1/tasks/{id}         -> the record, and the outputs once it is final
    GET  /v1/tasks/{id}/events  -> sse: the stream from any position, then live
    POST /v1/chat/completions, /v1/completions -> openai: tasks whose caller waits (foreground)
    /v1/models, /livez, /readyz, /metrics: read from the store and the broker

Needs the extra `penstock[gateway]`.
"""

from producers.gateway.app import create_app
from producers.gateway.server import serve
from producers.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings", "create_app", "serve"]
