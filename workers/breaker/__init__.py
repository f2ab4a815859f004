"""Circuit breaking: a worker whose engine fails, or is far slower than its peers', takes no tasks until a probe passes.

    engine's thread   a step ─▶ Window ─▶ Figures ─▶ the lease
    publisher         a task's end ─▶ Window, Breaker
    housekeeper       peers' leases ─▶ judge ─▶ EJECT ─▶ Breaker ─▶ probe, on its own engine ─▶ half open ─▶ closed

Each worker judges itself (docs/how/breaker.md).
"""
