"""Plugs Celery into broker and store, on Penstock's own connections.

redis: kombu's transport; intake (workers.flow) has fetched the messages, and hands them over in the event loop
Celery's acknowledge, reject and a closed channel go to celery_side (workers.flow); publishing stays kombu's
results: Celery's result backend
"""
