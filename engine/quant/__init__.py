"""Quantised weights of 4 and 8 bits: reads quantised checkpoints and makes them.

formats/: reads config.json's quantization_config and each quantised matrix as its checkpoint stores it (GPTQ, AWQ,
         compressed-tensors, FP8), as a Matrix of plain integers or an Fp8Matrix
layers/linear.py: joins the matrices of q, k, v or of gate and up if they are quantised alike, and hands them to the
         kernel set, packed as kernels/packed.py describes
make/: runs a model layer by layer over a calibration text, rounds each matrix so that its outputs for that text change
         least, and writes the "pack-quantized" form of compressed-tensors, which other engines read too

The matrices of attention and feed-forward blocks are quantised, not norms and biases. The output head, with an
embedding tied to it, is only quantised on request: it chooses between tokens, and is a small part of large models.
Each output (8 bits), or each group of inputs of an output (4 bits), has one scale.
"""
