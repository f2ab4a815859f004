"""The messages that a worker process has received from SQS: one `Receiver`, which the consumers of its threads share.

    poller (a thread a list) ─ ReceiveMessage ─▶ NOTE ─▶ buffer ─▶ fetch: TAKE ─▶ worker ─▶ put_down ─▶ sender ─▶ SQS

flight has a received message, its entry in the store's books, and the scripts that change those
buffer chooses the next message, and how many to poll for in which list; receive has the pollers and the receiver
send has the steps of a message's way out, the sender, a thread that takes them, and maintenance: renewals, due messages
"""
