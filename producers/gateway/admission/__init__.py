"""Decides which requests become tasks. What is refused has no record.

authentication: the API key -> accounts: what a task is charged to -> limits: the key's models and tiers, the stage of
overload (measured by overload) -> ADMIT, in the store, which counts: bounds on what waits, limits of the key
spent: accounts that are known to have nothing left in this minute
destinations: the addresses that webhooks may have
"""
