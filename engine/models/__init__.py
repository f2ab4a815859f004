"""From a Hugging Face folder to something that turns a step into logits.

registry.py finds the family by the architecture that config.json names; the family's file (llama.py) says by its
settings (settings.py, rotary.py, windows.py) what sets it apart, decoder.py makes the layers and says which checkpoint
tensor goes into which of their views; loader.py compares that with the files' headers, and then copies them there out
of memory-mapped safetensors, straight to device and dtype; the layers pack their weights.
"""

from engine.models.registry import Model, load_model, shape_of

__all__ = ["Model", "load_model", "shape_of"]
