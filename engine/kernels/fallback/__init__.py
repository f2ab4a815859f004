"""Kernel sets made of torch's own operations, for machines without the native library or Triton.

cpu: the set for CPUs, with weights packed by oneDNN; sdpa: attention in padded batches (padded), for any device
sampled: attention of decode steps on CPUs, without gathering keys and values; pieces: sizes of work for one thread
"""
