"""From the broker's lists into Celery's consumer, and back.

    waker -> intake (FETCH, as much as the ledger has credit for) -> redis (kombu's transport) -> Celery
    Celery or the pool -> courier (ACK, BACK)

`broker` builds the scripted calls; the scripts lie in `scripts/`.
"""
