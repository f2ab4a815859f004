"""Loads a Hugging Face folder as a model that computes a step's logits.

registry: finds the family by the architecture that config.json names (families)
settings: reads config.json into the family's settings
decoder: makes the layers and maps each checkpoint tensor to a view of a layer's weights
loader: checks these against the files' headers, then copies memory-mapped weights straight to device and dtype
registry also finds the quantised matrices of a checkpoint; at the end the layers pack their weights
"""

from engine.models.registry import Model, Size, load_encoder, load_model, shape_of, size_of

__all__ = ["Model", "Size", "load_encoder", "load_model", "shape_of", "size_of"]
