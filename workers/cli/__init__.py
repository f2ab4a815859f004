"""The `penstock` command.

    up, demo, chat               -> system -> supervisor -> children: valkey, gateway, workers
    run                          -> the engine, in this process
    models                       -> the models on this machine, and a hub's
    bench                        -> workers.bench: load on a gateway, over HTTP
    worker, gateway, sweeper     -> one of those processes, by itself
    submit, tail, result, cancel -> client -> a gateway, over HTTP

Modules import what they need when a command runs, so that `--help` is quick and a caller's machine needs no torch.
"""

from workers.cli.app import main

__all__ = ["main"]
