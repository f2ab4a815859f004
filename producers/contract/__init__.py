"""What callers and workers agree on: the formats, each described where it is written.

task (what a caller asks for; chat: its messages) -> message (how it travels) -> record (its state) -> events (its
stream) -> result keys names every key and channel; blocks is the compacted form of a stream
"""
