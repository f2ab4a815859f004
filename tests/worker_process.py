"""A worker for tests: `python -m tests.worker_process '{"broker": ..., "store": ..., ...}'`."""

import json
import os
import sys

from workers.settings import WorkerSettings
from workers.worker import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(WorkerSettings(**json.loads(sys.argv[1])), os.environ.get("LOG_LEVEL", "INFO")))
