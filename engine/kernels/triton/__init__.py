"""Triton kernels for NVIDIA GPUs.

A layer calls its kernel set (kernels/gpu.py), which calls a wrapper here. The wrapper picks tiles by shape from plain
tables and launches its kernel, which reads on the device all data that changes from step to step.
Triton compiles a kernel at its first launch with arguments of a kind, and caches it; ahead compiles without a GPU.
attention/, products/, sampling/ hold the larger groups of kernels; experts the kernels of mixtures
rowwise has norms, gates and rounding; step_inputs has one kernel
"""
