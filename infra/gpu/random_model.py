"""A bf16 Llama of random weights for the bench: python infra/gpu/random_model.py DIR --shape {1b,tiny}"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.engine.random_models import write_model

SHAPES = {
    # Llama 3.2 1B's.
    "1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "tiny": {"vocab_size": 512, "max_position_embeddings": 2048},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    args = parser.parse_args()
    write_model(args.folder, tokenizer=False, dtype="bfloat16", spread=0.02, **SHAPES[args.shape])


if __name__ == "__main__":
    main()
