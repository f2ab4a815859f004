"""Finds models on this machine, pulls them from a hub, and checks their files.

NAME=, a path, a bundled or pulled name -> reference -> its folder
hf://OWNER/NAME[@REVISION] -> hub: the needed files -> huggingface_hub's cache -> checksums -> local_models
local_models: {root}/{name}/{version}/ with a manifest.json, written last, of every file's SHA-256
verify: compares a folder's files with its manifest at every load; a folder, checked -> its card and tokenizer files
"""

from workers.library.local_models import LocalModels
from workers.library.reference import Found, find_model, name_of
from workers.library.verify import verify

__all__ = ["Found", "LocalModels", "find_model", "name_of", "verify"]
