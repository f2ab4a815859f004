"""Messages from any language become tasks, and their results go back as messages.

    inbox (SQS queue, list of the store) ─▶ source.py: plain JSON or a CloudEvent ─▶ one task for each
                                                                     │ refused: a reply, and the dead letters
    a task's end: a row of the outbox ─▶ replies.py: its result ─▶ queue, topic or list

The settings (`source.py`) say where replies may go. docs/use/sources.md says what remains when a process dies.
"""
