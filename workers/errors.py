"""Errors that keep a worker or a command from its work."""


class Refused(Exception):
    """A server or a model cannot be used; the message says why and what to use instead."""
