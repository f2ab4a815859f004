"""HTTP itself, whatever the route.

connection (limits of a socket) -> edge (request id, counts, last resort) -> body (JSON in) -> route -> sse (events out)
errors gives every refusal its one shape
"""
