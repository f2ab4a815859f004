"""Finds models on this machine, pulls them from a hub, and checks their files.

NAME=, a path, a bundled or pulled name -> reference -> its folder
hf://OWNER/NAME[@REVISION] -> hub: the needed files -> huggingface_hub's cache -> checksums -> local_models
smollm2: the file of an installed package, or else the hub's
local_models: {root}/{name}/{version}/ with a manifest.json, written last, of every file's SHA-256
verify: compares a folder's files with its manifest at every load
"""

from workers.library.local_models import LocalModels, verify
from workers.library.reference import ResolvedModel, find_model, name_of

__all__ = ["LocalModels", "ResolvedModel", "find_model", "name_of", "verify"]
