"""The whole system on one machine: `penstock up`, `run` and `chat`.

up -> plan -> system (which processes, on which ports) -> workers.processes (keeps children running)
              pools: the workers, as many as the autoscaler says
embedded keeps the data directory and its Valkey; background runs a system beside one command
"""
