"""Weights of 4 and 8 bits, from checkpoints and into them.

formats/ reads config.json's quantization_config and takes each quantised matrix as its checkpoint stores it (GPTQ, AWQ,
compressed-tensors, FP8) to a Matrix of plain integers; layers/linear.py joins those of q, k, v or of gate and up where
they are alike, and hands them to the kernel set, packed as kernels/packed.py says. make/ goes the other way: it runs a
model layer by layer over a calibration text, rounds each matrix so that what it makes of that text changes least, and
writes a folder in the "pack-quantized" form of compressed-tensors, which other engines read too.

What is quantised: the matrices of attention and feed-forward blocks. Norms and biases are not, nor is the output head
unless that is asked for, and with it an embedding that it is tied to: it makes the choice between tokens, and is a
small part of large models.
Scales are one for each output (8 bits) or for each group of inputs and output (4 bits).
"""
