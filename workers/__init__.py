"""Runs queued tasks in the engine, and everything around that.

    transport (FETCH) -> pool (CLAIM) -> engine -> publisher (APPEND, FINISH) -> finisher (tracer, SETTLE, ACK)

`worker.run_worker` starts one worker; `runtime.Runtime` is what it holds; `cli` is the `penstock` command.
"""
