"""Checks whether a run kept Penstock's promises. It shares no code with the product, so it shares none of its bugs.

    journals (what clients saw, which faults came) -> `case`    -> \
    broker and store after the run                 -> `store`   ->  `rules` -> violations -> `report`
    workers' leases, renewed after the run         -> `rest`    -> /
    the same prompts, run without faults           -> `outputs` -> /

Imports only redis-py and the standard library (`lint-imports` and a test check that). It parses Penstock's formats
itself, from their description in docs/how/protocol.md.
"""
