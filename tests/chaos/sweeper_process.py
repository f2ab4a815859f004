"""A sweeper with little patience: `python -m tests.chaos.sweeper_process '{"broker": ..., "store": ..., ...}'`.

It is `penstock sweeper`, but for its times: what a killed process left half done is finished in seconds.
"""

import asyncio
import json
import logging
import sys

from producers.sweeper.retention import Ages
from producers.sweeper.sweeper import SweeperSettings
from workers.cli.background import sweep

#: Times in seconds.
HASTY = {
    "every": 1.0,
    "unsent_after": 3.0,
    "unsettled_after": 3.0,
    "reader_lease": 3.0,
    "usage": Ages(fold=5.0, roll=0.0),
}

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    settings = {**HASTY, **json.loads(sys.argv[1])}
    asyncio.run(sweep(SweeperSettings(**settings)))
