"""Celery's pool, whose slots are sequences of the running batch.

    engine_pool (Celery hands a task over) -> claimer (CLAIM, tokenise) -> engine

A `Delivery` is what is in hand, the `Ledger` counts the room that is left.
"""
