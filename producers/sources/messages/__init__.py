"""Messages from any language become tasks, and their results go back as messages.

    inbox (SQS queue, list of the store) ─▶ envelope.py: plain JSON or a CloudEvent ─▶ source.py: one task for each
                                                                                       │ refused: told, and buried
    a task's end: a row of the outbox ─▶ replies.py ─▶ answer.py: its result ─▶ targets.py: queue, topic or list

The settings (`source.py`) say where replies may go. docs/how/deaths.md says what stands when a process dies.
"""
