"""The formats that callers and workers share. Each module describes its format.

task (a caller's request; chat: its messages) -> message (on the queue) -> record (its state) -> events (its stream)
-> result. keys names every key and channel; blocks is the compacted form of a stream; profile is what workers measured.
"""
