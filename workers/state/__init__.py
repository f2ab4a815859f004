"""What one worker knows while it runs; no threads, no I/O.

served: the model that it serves, its queues, its settings; incarnation: one life of the worker under one lease
delivery: one message in its hands, from FETCH until ACK or BACK; ledger: the room that is left for more
clock: what is to be done later, and the store's time
"""
