"""The machine around a worker: its GPU, its processes, and notices that it is to end.

gpu_facts ─▶ lease;  spot, task_protection ─▶ drain;  proc reads /proc
"""
