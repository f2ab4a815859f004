"""Files that come to a bucket or a folder become batches, and their results go back there.

    notified  a queue's messages ─▶ notification ─▶ bucket: the object ─┐
    watched   looks at a folder again and again ─▶ folder: the file ────┴▶ work: INBOX_TAKE, an entry in the store
    work      open entries ─▶ intake: blob, batch ─▶ (the sweeper runs it) ─▶ delivery: outbox ─▶ INBOX_DONE

place is what bucket and folder have in common; settings what their tables have. docs/how/deaths.md says what stands
when a process dies.
"""
