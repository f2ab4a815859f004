"""Operators' tools: fleet reads all pools; dead_letters lists and replays dead letters; tenants weighs tenants;
keys makes, changes and ends API keys; secrets encrypts what is stored anew."""
