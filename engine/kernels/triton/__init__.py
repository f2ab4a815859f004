"""Kernels in Triton, for NVIDIA GPUs.

A layer calls its kernel set (kernels/gpu.py), which calls a wrapper here; the wrapper chooses tiles from plain tables
by shape and launches its kernel, with what changes from step to step read on the device. Triton compiles a kernel
when it is first launched with arguments of a kind, and keeps it in its cache; ahead.py has it do so before there is a
GPU.
"""
