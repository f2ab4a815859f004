"""Trains the bundled models, on any machine that has Python: `python -m infra.models NAME --out DIR`.

workers.library.corpus: the standard library's sources, as training and held-out files; chat: makes pairs of these
tokenizer: learns a byte-level BPE from the training files; recipes: the shape and training of each model
grow: widens a trained network to start from; llama: the network in plain torch
train: the training loop; measure: the held-out perplexity; folder, card: write a Hugging Face folder
"""
