"""Operators' tools: dead_letters lists, replays and removes dead letters; tenants lists and weighs tenants."""
