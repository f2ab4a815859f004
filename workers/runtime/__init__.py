"""One worker process, from its start to its end.

worker: serving loads and announces the model -> assembly makes the parts and starts their threads -> Celery's worker
watchdog and health watch it; stopping and signals hear that it is to end; drain ends it; host/ is the machine around it
"""
