"""The broker in one process: for tests, for one-process use, and as what the scripts of the one on Redis must do.

    memory://NAME -> Server (all state, one lock) <- consumer, operator: the faces of `producers.broker.base`

message reads what a sender wrote; turns has the turns of tenants within a list; fetch chooses what is next
tests/protocol compares the server with the Lua scripts, call by call.
"""
