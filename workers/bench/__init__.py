"""Load on a running system over HTTP, and what it answers.

    load: what is asked, and when -> drive: asks it, in open or closed loop, over connection -> one Sample a request
    -> summary: percentiles, rates, goodput, and what the client itself cost -> plot: an SVG

Latencies are a caller's: from the moment that a request was due to the moment that its tokens arrived.
"""

from workers.bench.drive import Client, Sample, drive
from workers.bench.load import Ask, Load
from workers.bench.plot import plot
from workers.bench.summary import Limits, percentile, summary

__all__ = ["Ask", "Client", "Limits", "Load", "Sample", "drive", "percentile", "plot", "summary"]
