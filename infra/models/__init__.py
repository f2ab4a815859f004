"""Training of the bundled models, rerunnable on any machine that has Python.

The way of the data: `corpus` reads the standard library's sources and cuts them into training and held-out files and
chat pairs; `tokenizer` learns a byte-level BPE from the training files; `recipes` says what each model is made of, and
`grow` what it starts from; `llama` is the network in plain torch; `train` goes through the steps, `measure` tells what
came of it, and `folder` writes a Hugging Face folder. Run it with `python -m infra.models NAME --out DIR`.
"""
