"""The formats that callers and workers share. Each module describes its format.

task (a caller's request; chat: its messages) -> message (on the queue) -> record (its state) -> stream (its events, and
the result that they sum to). keys names every key, channel and queue; leases is the protocol by which workers look
after each other; profile is what workers measured.
"""
