"""Celery's side of a worker: an app whose pool has a slot for each sequence of the running batch.

app makes it, with the task penstock.generate (task), its requests (request) and its consumer; boot does that beside
the model's load
consumer -> engine_pool -> batch: celery_side of workers.flow -> claimer; other tasks run on a few threads beside the
engine
control: remote control, where Celery's own commands do not know how such a worker works
"""
