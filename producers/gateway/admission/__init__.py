"""Admission: limits refuses a task that would wait too long with 429, before anything is written."""
