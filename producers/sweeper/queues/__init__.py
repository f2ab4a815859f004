"""Queues without workers: orphaned takes back what those held, retired_pools looks after the pool itself."""
