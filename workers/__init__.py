"""Runs queued tasks in the engine, and the `penstock` command.

runtime loads a model and puts one worker process together; settings is what that is told
flow takes a delivery through: FETCH -> Celery (transport, pool) -> CLAIM -> engine -> APPEND, FINISH -> SETTLE, ACK
leases keeps the worker's lease and mends what dead workers left; library finds and checks models on this machine
cli is the command; bench measures a running system, chaos breaks one on purpose and checks what it promised
"""
