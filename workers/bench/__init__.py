"""Puts load on a running system over HTTP and measures its answers.

    load: requests and their times -> drive: sends them, in open or closed loop, over connection -> one Sample a request
    -> summary: percentiles, rates, goodput, and the client's own cost -> plot: an SVG

Latencies are a caller's: from the time at which a request was due to the arrival of its tokens.
"""

from workers.bench.drive import Client, Sample, drive
from workers.bench.load import Ask, Load
from workers.bench.plot import plot
from workers.bench.summary import Limits, percentile, summary

__all__ = ["Ask", "Client", "Limits", "Load", "Sample", "drive", "percentile", "plot", "summary"]
