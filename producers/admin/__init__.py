"""Operators' tools.

fleet reads all pools; observation and explain say what keeps a task; dead_letters lists and replays dead letters
keys makes, changes and ends API keys; tenants weighs tenants; roles and deployment make a deployment's users and TLS
secrets encrypts stored secrets with a new key
"""
