"""The way of a delivery through a worker, from thread to thread.

intake (FETCH, as far as ledger has room) -> celery_side -> claimer (CLAIM) -> engine -> publisher (APPEND, FINISH)
-> deliveries: the acker (ACK, BACK)
tasks of plain Celery senders go from intake to Celery's consumer and pool, and after FINISH to finisher (Celery's
tracer, SETTLE), which also lets go what is to be handed back (RELEASE)
monitors shows Celery's monitors the others
a delivery (workers.state) is what travels; deliveries keeps the books of all
stream reads back tokens that earlier workers published
probe checks that the model still answers
"""
