"""One worker process, from its start to its end.

worker: serving loads and announces the model -> assembly makes the parts and starts their threads -> Celery's worker
watchdog, health and gpu_facts watch it; stopping, signals and spot hear that it is to end; drain ends it;
task_protection asks ECS not to end it while it is busy
"""
