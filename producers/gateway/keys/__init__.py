"""`/v1/keys` and `/v1/audit`, for keys of the scope admin: who may do what, and who changed it.

body -> producers.admin.keys: checked, changed with its audit entry -> views, without secrets
"""

from producers.gateway.keys.routes import router

__all__ = ["router"]
