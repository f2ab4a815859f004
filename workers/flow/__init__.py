"""The way of a delivery through a worker, from thread to thread.

intake (FETCH, as far as ledger has room) -> Celery's consumer and pool -> celery_side -> claimer (CLAIM) -> engine
-> publisher (APPEND, FINISH) -> finisher (after FINISH: Celery's tracer, SETTLE) -> deliveries: the acker (ACK, BACK)
a delivery (workers.state) is what travels; deliveries keeps the books of all
stream reads back tokens that earlier workers published
probe checks that the model still answers
"""
