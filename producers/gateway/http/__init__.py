"""The HTTP layer that all routes share.

connection (limits of a socket) -> edge (turns, request id) -> request_body (JSON in) -> route -> sse (events out)
errors gives every error the same JSON form
"""
