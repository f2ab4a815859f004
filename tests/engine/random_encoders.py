"""Folders of encoders with random weights, as transformers writes them: every architecture that the engine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
_DISTILBERT = {"dim": 48, "n_layers": 3, "n_heads": 3, "hidden_dim": 80}
_MODERN = {
    "local_attention": 12,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Name -> the prefix of transformers' classes, and what differs from SMALL.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    # Heads of 12, which no native kernel attends to.
    "bert": ("Bert", {"hidden_act": "gelu_new", "num_attention_heads": 4}),
    "distilbert": ("DistilBert", _DISTILBERT),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "relu"}),
    "mpnet": ("MPNet", {"pad_token_id": 1, "num_attention_heads": 6}),
    "modernbert": ("ModernBert", _MODERN),
    "modernbert-mean": ("ModernBert", _MODERN | {"classifier_pooling": "mean", "norm_bias": True, "mlp_bias": True}),
    "nomic": ("NomicBert", {}),
    "gte": ("Gte", {"type_vocab_size": 0}),
}


def random_encoder(name: str, suffix: str = "Model", **changes: Any) -> Any:
    """transformers' model of one of ENCODERS with random weights, in fp32. `suffix`: of its class."""
    import transformers

    prefix, settings = ENCODERS[name]
    config = getattr(transformers, f"{prefix}Config")(**SMALL | settings | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}{suffix}")(config)
    for parameter in model.parameters():
        # Larger than a new model's, so that what is wrong shows; norms stay near 1.
        scale = 0.15 if parameter.dim() > 1 else 0.1
        offset = 1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0
        torch.nn.init.normal_(parameter, offset, scale)
    return model.float().eval()


def write_encoder(folder: Path, name: str, suffix: str = "Model", **changes: Any) -> Any:
    """Write such a model into `folder`. Returns transformers' own."""
    model = random_encoder(name, suffix, **changes)
    model.save_pretrained(folder)
    return model
