"""Benchmarks of the engine: `python -m engine.bench`.

offline: throughput on fixed workloads, with all requests at once; load: latency at random arrivals of rising rates
ceilings: measures the limits of the machine; breakdown: times the parts of a step
peer: runs transformers on the same workloads; options: checks the command line
"""
