"""The HTTP layer that all routes share.

connection (limits of a socket) -> edge (request id, counts, last resort) -> body (JSON in) -> route -> sse (events out)
errors gives every error the same JSON form
"""
