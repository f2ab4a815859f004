"""Plugs Celery into broker and store, on Penstock's own connections.

redis: kombu's transport, which knows its worker by a Link alone
arrivals: intake (workers.flow) has fetched the messages, and hands them over in the event loop
owner: celery_side (workers.flow) hears of Celery's acknowledge, reject and a closed channel; publishing stays kombu's
results: Celery's result backend
"""
