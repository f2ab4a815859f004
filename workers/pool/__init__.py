"""Celery's side of a worker: an app whose pool has a slot for each sequence of the running batch.

app makes it, with its result backend, the tasks penstock.generate, .embed, ... and their requests, and its consumer;
`Boot` in workers.runtime.worker does that beside the model's load
transport: kombu's for Redis. intake (workers.flow) has fetched the messages, and hands them over in the event loop;
celery_side (workers.flow) is called for Celery's acknowledge and reject, and for a closed channel
consumer -> engine_pool -> celery_side of workers.flow, the running batch -> claimer; other tasks run on a few threads
beside the engine
"""
