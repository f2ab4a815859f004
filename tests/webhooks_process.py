"""A webhooks process for tests: `penstock webhooks run` with settings that the command has no options for."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from tests.receiver import Process
from workers.webhooks.deliverer import WebhookSettings, run


class WebhooksProcess(Process):
    """`settings` are WebhookSettings; capital letters are environment variables."""

    def __init__(self, url: str, **settings: Any) -> None:
        env = {name: str(value) for name, value in settings.items() if name.isupper()}
        usual = {"store": url, "allowed": ["127.0.0.0/8"], "schedule": [0.0, 0.2, 0.4], "timeout": 3.0, "lease": 5.0}
        given = {name: value for name, value in settings.items() if not name.isupper()}
        super().__init__("tests.webhooks_process", json.dumps(usual | given), **env)


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    said = json.loads(sys.argv[1])
    asyncio.run(run(WebhookSettings(**{**said, "allowed": tuple(said["allowed"])})))
