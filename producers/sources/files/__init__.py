"""Files that come to a bucket or a folder become batches, and their results go back there.

    bucket    a queue's messages ─▶ notification ─▶ the object ─┐
    folder    looks at a folder again and again ─▶ the file ────┴▶ work: INBOX_TAKE, an entry in the store
    work      open entries ─▶ Intake: blob, batch ─▶ (the sweeper runs it) ─▶ Delivery: outbox ─▶ INBOX_DONE

`work.Location` is the interface that bucket and folder implement. docs/use/sources.md says what remains when a process
dies.
"""
