"""Runs queued tasks in the engine, and the `penstock` command.

runtime loads a model and puts one worker process together, by its settings
flow takes a delivery through: FETCH -> Celery (transport, pool) -> CLAIM -> engine -> APPEND, FINISH -> SETTLE, ACK
leases keeps the worker's lease and repairs what dead workers left; library finds and checks models on this machine
autoscaler, rollout and webhooks are processes of their own beside workers; cli is the command
trials is apart from all of it: load, faults with a checker of what was promised, traces for the scaling policy
"""
