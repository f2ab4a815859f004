"""Kernels for CPUs out of torch's own operations, for machines where the native library does not run.

cpu is the set; sdpa attends in padded batches, sampled reads keys and values where they lie; pieces sizes the work
"""
