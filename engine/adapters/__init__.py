"""LoRA adapters: small changes of a loaded model's matrices, many of which are served beside each other.

engine.text.adapter reads a folder of PEFT's; `load_adapter` checks it against the model and makes an Adapter of it
engine.scheduling.adapters has those that requests may name; a request keeps its Adapter until it ends
step_adapters sorts the rows of a step by adapter; each Linear adds its adapters' changes to its result
"""

from engine.adapters.adapter import Adapter, load_adapter
from engine.adapters.rows import AdapterRows, owners_of, step_adapters

__all__ = ["Adapter", "AdapterRows", "load_adapter", "owners_of", "step_adapters"]
