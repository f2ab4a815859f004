"""A worker for tests: `python -m tests.worker_process '{"broker": ..., "store": ..., ...}'`.

Environment: WORKER_PLUGINS names functions (`module:function,...`) to be called before it starts; WORKER_TIMES are
other values of the product's constants, JSON by `module:NAME`. With ENGINE_PROCESS the engine has a process of its own
unless the settings say otherwise: `ENGINE_PROCESS=1 pytest tests/workers` tests workers of that kind.
"""

import json
import os
import sys
from importlib import import_module

from workers.runtime.worker import run_worker
from workers.settings import WorkerSettings

if __name__ == "__main__":
    for constant, value in json.loads(os.environ.get("WORKER_TIMES", "{}")).items():
        module, _, name = constant.partition(":")
        setattr(import_module(module), name, value)
    for plugin in filter(None, os.environ.get("WORKER_PLUGINS", "").split(",")):
        module, _, function = plugin.partition(":")
        getattr(import_module(module), function)()
    settings = {"engine_process": "ENGINE_PROCESS" in os.environ, **json.loads(sys.argv[1])}
    sys.exit(run_worker(WorkerSettings(**settings), os.environ.get("LOG_LEVEL", "INFO")))
