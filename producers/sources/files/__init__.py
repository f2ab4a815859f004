"""Files that come to a bucket or a folder become batches, and their results go back there.

    bucket    a queue's messages ─▶ notification ─▶ the object ─┐
    folder    looks at a folder again and again ─▶ the file ────┴▶ work: INBOX_TAKE, an entry in the store
    work      open entries ─▶ Intake: blob, batch ─▶ (the sweeper runs it) ─▶ Delivery: outbox ─▶ INBOX_DONE

    vectors   texts ─▶ lines of a batch; its answers ─▶ vectors, for sources whose inputs are texts

`work.Location` is the interface that bucket and folder implement. docs/use/sources.md says what remains when a process
dies.
"""
