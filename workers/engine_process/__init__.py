"""The engine in a process of its own, which does nothing else (docs/how/worker.md).

    claimer ─▶ front: submit, abort ─▶ socket ─▶ child: the engine ─▶ a step's events ─▶ packed ─▶ ring
    publisher ◀─ front: events, on_step ◀─────────────────────────────────────────────────────────┘

front: the worker's side, which behaves as an engine does; child: the process; ring: the memory that they share;
packed: a step's events as bytes
"""
