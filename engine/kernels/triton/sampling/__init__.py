"""The sampler in Triton: logits to tokens without the host.

edits applies penalties, biases, masks and temperature; filters finds the bounds of top-k, top-p, min-p and typical
sampling; noise draws; sampler launches them
"""
