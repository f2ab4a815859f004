"""The way of a delivery through a worker, a thread a step.

waker -> intake (FETCH, as far as ledger has room) -> Celery's consumer -> pool -> claimer (CLAIM) -> engine
-> publisher (APPEND, FINISH) -> finisher (Celery's tracer, SETTLE) -> acker (ACK, BACK)
delivery is what travels; stream reads back the tokens that earlier workers published
"""
