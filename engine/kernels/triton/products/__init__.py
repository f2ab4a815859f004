"""Matrix products in Triton.

product: sums each row in the same way in any batch, for deterministic mode
quantised: multiplies 4- and 8-bit weights
one_row: multiplies a single row, as one sequence decodes
"""
