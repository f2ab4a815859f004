"""The HTTP gateway: FastAPI in front of `producers.AsyncClient`. It validates and tokenises, and never generates.

    POST /v1/tasks -> http: edge (request id, metrics), body (size) -> tasks.submit: Task, its text as token ids
                   -> admission -> AsyncClient.admit (ADMIT, message, QUEUED) -> 202
    GET  /v1/tasks/{id}         -> the record, and the outputs once it is final
    GET  /v1/tasks/{id}/events  -> client's reader -> http.sse: the stream from any position, then live
    POST /v1/chat/completions, /v1/completions, /v1/responses -> openai -> tasks.foreground: the same, and its events;
                   tasks are cancelled when the caller leaves
    POST /v1/messages -> anthropic -> openai: a translation onto chat completions
    POST /api/chat, /api/generate, /api/embed -> ollama -> openai: the same, onto chats and vectors
    /v1/models, /livez, /readyz, /metrics: read from the store and the broker

Needs the extra `penstock[gateway]`.
"""

from producers.gateway.app import create_app
from producers.gateway.server import serve
from producers.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings", "create_app", "serve"]
