"""Trains the bundled models, on any machine that has Python: `python -m infra.models NAME --out DIR`.

corpus: reads the standard library's sources and cuts them into training and held-out files and chat pairs
tokenizer: learns a byte-level BPE from the training files; recipes: the shape and training of each model
grow: widens a trained network to start from; llama: the network in plain torch
train: the training loop; measure: the held-out perplexity; folder, card: write a Hugging Face folder
"""
