"""The API key that this process's requests to gateways carry. It comes by the environment: others see command lines."""

from __future__ import annotations

import os
import re
from typing import Final

from workers.errors import Refused

API_KEY: Final = "PENSTOCK_API_KEY"


def authorization() -> dict[str, str]:
    """The header for it; none without a key. Raises Refused for what no header may hold, without showing it."""
    key = os.environ.get(API_KEY, "").strip()
    if not key:
        return {}
    if not re.fullmatch("[!-~]+", key):
        raise Refused(f"{API_KEY} holds what no API key has: spaces, line breaks, or letters that are not ASCII")
    return {"authorization": f"Bearer {key}"}
