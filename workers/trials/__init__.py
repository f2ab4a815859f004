"""Trials of Penstock, apart from what runs in production, which knows nothing of them.

simulate   traces of arrivals through the scaling policy           penstock scale simulate
"""
