"""A worker process's share of its SQS queues: one `Hold`, which the consumers of its threads share.

    poller (a thread a list) ─ ReceiveMessage ─▶ NOTE ─▶ buffer ─▶ fetch: TAKE ─▶ given ─▶ put_down ─▶ courier ─▶ SQS

held has a message and its receipt; buffer chooses what is next, with the turns of the broker in memory
polls says which lists may be polled now, and for how many messages; poller asks SQS for them
errand has the steps of a message's way out; courier, a thread, takes them by requests; chores: what it does beside
reaping has the plan of REAP, calls the other scripts; shared has the holds of this process
"""
