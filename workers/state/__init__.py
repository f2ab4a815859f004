"""The state of one worker while it runs; no threads, no I/O.

served: the model that it serves, its queues, its settings
delivery: one message in its hands, from FETCH until ACK or BACK, and the worker's life under one lease
clock: what is to be done later, and the store's time
"""
