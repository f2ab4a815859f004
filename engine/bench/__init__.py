"""Measures the engine: `python -m engine.bench`.

offline: fixed workloads, all requests at once; load: requests arrive at random, at rates tried one after another
ceilings measures what the machine could do at best; breakdown says which part of a step takes the time
peer runs transformers on the same workloads; plot draws curves; options checks the command line
"""
