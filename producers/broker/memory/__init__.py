"""The broker in one process: for tests, for one-process use, and as the model of the scripts of the broker on Redis.

    memory://NAME -> server: all state, under one lock <- broker: the interface of `producers.broker.base`

message reads what a sender wrote; the broker on SQS has that and the choice of the next message from here
tests/protocol compares the server with the Lua scripts, call by call.
"""
