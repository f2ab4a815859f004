"""The whole system on one machine: `penstock up`, `run` and `chat`.

up -> system (which processes, on which ports) -> workers.processes (keeps children running)
embedded keeps the data directory and its Valkey; background runs a system beside one command
"""
