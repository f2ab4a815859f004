"""`penstock batch`: files of requests, through a gateway.

commands (what is typed) -> client (files and batches over HTTP) -> results (waits, and writes what came of a batch)
"""
