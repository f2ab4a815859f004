"""Runs untrusted or unbounded work in a child process that can be killed. No torch.

process: starts the child, sends it requests and ends it when it exceeds its limits; the frames on the pipes between
child: the child's loop: modules imported, sealed, set up, one request after another
seal: takes from the child what its work does not need: files, sockets, processes, new code

Chat templates, large texts and the forms of outputs come from callers and models, so their work runs here.
"""

from engine.confined.process import ConfinedProcess, Limits, Stopped

__all__ = ["ConfinedProcess", "Limits", "Stopped"]
