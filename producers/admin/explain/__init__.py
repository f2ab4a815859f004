"""Says of a task where it is, what keeps it, and when it will start and end; in data and in words.

    record ─▶ look: fleet, place in the queue ─▶ Seen ─▶ reasons: what keeps it      ─▶ Explanation ─▶ words
                                                     ─▶ estimate: when it starts, ends

It reads broker and store, and changes nothing. What nobody measured or tells is None, never a guess.
"""

from producers.admin.explain.explanation import Estimate, Explanation, explain
from producers.admin.explain.reasons import Reason

__all__ = ["Estimate", "Explanation", "Reason", "explain"]
