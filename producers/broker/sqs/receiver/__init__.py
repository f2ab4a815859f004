"""What a worker process has received from SQS: one `Receiver`, which the consumers of its threads share.

    poller (a thread a list) ─ ReceiveMessage ─▶ NOTE ─▶ buffer ─▶ fetch: TAKE ─▶ worker ─▶ put_down ─▶ sender ─▶ SQS

flight has a received message, its entry in the store's books, and the scripts that change those
buffer chooses which message is next, and which lists are polled for how many; receive has the pollers and the receiver
send has the steps of a message's way out, and the sender, a thread that takes them; maintenance: what it does beside
"""
