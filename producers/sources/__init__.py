"""Event sources: what comes from elsewhere becomes tasks and batches (`penstock sources`). Any number may run.

    a TOML file ─▶ settings.py: one table a source, checked ─▶ source.py: each source runs, and is started again

Each type is a module of its own, which `settings.TYPES` names. A source keeps its position in the store, under an id
that is a function of its input. So a source that is killed anywhere, or runs twice, makes each task once.
"""
