"""Decides what is let in: a task that would wait too long is refused with 429 before anything of it is written
(limits)."""
