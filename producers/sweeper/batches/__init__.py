"""Batches: a file of requests becomes tasks, and their results a file.

validate checks an input as a whole, before anything runs
"""
