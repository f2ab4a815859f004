"""A gateway to be fuzzed: `python -m tests.fuzz.gateway_process SETTINGS`, which are GatewaySettings as JSON."""

import json
import logging
import sys

from producers.gateway import GatewaySettings, health, serve
from workers.cli.servers import open_port

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    health.PATIENCE_S = 60.0  # servers that are slow to answer, on a busy machine, are none that are away
    settings = GatewaySettings(**json.loads(sys.argv[1]))
    serve(settings, open_port(settings.host, settings.port))
