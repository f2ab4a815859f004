"""Matrix products in Triton.

product: sums each row in the same way in any batch, for deterministic mode
quantised: multiplies 4- and 8-bit weights with the kernels of quantised_kernels
fp8: rounds activations to 8-bit floats
"""
