"""From a Hugging Face folder to something that turns a step into logits.

registry.py reads config.json and finds the family by its architecture's name; the family's file (llama.py) checks
the settings, makes its layers and says which checkpoint tensor goes into which of their views; loader.py copies
them there out of memory-mapped safetensors, straight to device and dtype; the layers then pack their weights.
Adding a family is one file and one line in registry.py.
"""

from engine.models.registry import Model, load_model

__all__ = ["Model", "load_model"]
