"""Trials of Penstock, apart from what runs in production, which knows nothing of them.

bench      load on a running system, and what it measures          penstock bench
chaos      faults in a running system, and an independent checker  penstock chaos, tests/chaos
simulate   traces of arrivals through the scaling policy           penstock scale simulate
"""
