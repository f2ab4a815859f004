"""Decides which requests become tasks. What is refused has no record.

authentication: the API key -> limits: what a task is charged to, which accounts have nothing left in this minute,
the key's models and tiers, the stage of overload, the addresses of webhooks
-> ADMIT, in the store, which counts: bounds on waiting tasks, limits of the key
"""
