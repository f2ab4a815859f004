"""Training of the bundled models, rerunnable on any machine that has Python.

The way of the data: `corpus` reads the standard library's sources and cuts them into training and
held-out files and chat pairs; `tokenizer` learns a byte-level BPE from the training files; `llama` is
the network in plain torch; `train_tiny` encodes, trains and measures; `folder` writes the result as
a Hugging Face folder. Run it with `python -m workers.models_train.train_tiny --out DIR`.
"""
