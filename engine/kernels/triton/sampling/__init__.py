"""The sampler in Triton: samples tokens from logits without the host.

edits: applies penalties, biases, masks and scale
filters: finds the bounds of top-k, top-p, min-p and typical sampling
sampler: makes the Gumbel noise, launches the kernels and picks the tokens
"""
