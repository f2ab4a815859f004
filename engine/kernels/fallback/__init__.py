"""Kernel sets made of torch's own operations, for machines without the native library or Triton.

sdpa: attention in padded batches (padded), for any device; cpu: the same for CPUs, with weights packed by oneDNN
"""
