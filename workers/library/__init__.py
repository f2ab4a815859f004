"""Models on this machine, and how they come here.

NAME=, a path, a bundled or pulled name -> reference -> its folder
hf://OWNER/NAME[@REVISION] -> hub: what is needed -> huggingface_hub's cache -> checksums -> shelf
shelf: {root}/{name}/{version}/ with a manifest.json, written last, of every file's SHA-256
verify: at every load, the files against that
"""

from workers.library.local_models import Shelf
from workers.library.reference import Found, find_model, name_of
from workers.library.verify import verify

__all__ = ["Found", "Shelf", "find_model", "name_of", "verify"]
