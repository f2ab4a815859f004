"""The layers that models are built from, on top of the operations of one kernel set.

A layer allocates its own empty tensors. `weights(prefix)` maps checkpoint tensors to views of them, so that q, k and v
land in one packed matrix. The loader fills the views, `pack` hands the tensors to the kernel set, and calling the layer
runs it on token rows [tokens, width].
"""

from engine.layers.adapted import AdaptedRows, StepAdapters
from engine.layers.attention import (
    Attention,
    AttentionShape,
    DividedScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NormedAttention,
    RmsNorm,
    Rope,
    RopeScaling,
    UnmaskedAttention,
    YarnScaling,
)
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import Experts, ExpertShape, GatedMlp

__all__ = [
    "AdaptedRows",
    "Attention",
    "AttentionShape",
    "DividedScaling",
    "DynamicScaling",
    "Embedding",
    "ExpertShape",
    "Experts",
    "GatedMlp",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NormedAttention",
    "RmsNorm",
    "Rope",
    "RopeScaling",
    "StepAdapters",
    "UnmaskedAttention",
    "YarnScaling",
]
