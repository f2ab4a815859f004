"""Puts load on a running system over HTTP and measures its answers.

    load: requests and their times, sent in open or closed loop, over connection -> one Sample a request
    -> figures: percentiles, rates, goodput, and the client's own cost; an SVG

Latencies are a caller's: from the time at which a request was due to the arrival of its tokens.
"""
