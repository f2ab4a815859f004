"""Event sources: what comes from elsewhere becomes tasks and batches (`penstock sources`). Any number may run.

    a TOML file ─▶ settings.py: one table a source, checked ─▶ runner.py: each source runs, and is started again
    source.py says what a source is; each type is a module of its own, which `settings.TYPES` names

A source keeps its place in the store, under an id that is a function of what came. So one that is killed anywhere, or
runs twice, makes each task once.
"""
