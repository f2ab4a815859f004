"""Backups of a running system, and systems made of them (docs/run/backup.md).

store ─▶ take: entries ─▶ archive: segments and blobs, sealed, and a manifest
store ─▶ journal: what must not come back, written by the leading sweeper
archive, journal ─▶ plan: what will be there ─▶ restore: an empty store
"""
