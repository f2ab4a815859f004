"""`penstock worker`, `gateway` and `sweeper`: one process each, as the Procfile starts them."""

from __future__ import annotations

from workers.cli.commands import Commands
from workers.cli.exits import PROCESS_STATUS
from workers.cli.processes import gateway, sweeper, worker

_SERVER = "--broker redis://10.0.0.5:6379/0"
app = Commands("Processes", PROCESS_STATUS)


app.shown(f"penstock worker {_SERVER} --model tiny --max-num-seqs 32")(worker.worker)
app.shown(f"penstock gateway {_SERVER} --host 0.0.0.0 --port 8000")(gateway.gateway)
app.shown(f"penstock sweeper {_SERVER}")(sweeper.sweeper)
