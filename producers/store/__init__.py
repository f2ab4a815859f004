"""The store's side of the protocol: records and streams, and what else lasts.

protocol has one function for each script, which returns the `Call` to send; scripts/ has the Lua
batches has batches: their scripts, and how they are read
outbox has the events that wait to be delivered to webhooks
fleet/ has models' cards and files, what workers measured, scaling decisions and rollouts
files has what is known of uploaded files, blobs their bytes
task_index has the tasks that clients submitted; waiting the bounds on what waits; usage/ the ledger, limits, prices
references name blobs of results; files keeps bodies of messages that are too large for their queue
idempotency lets a repeated request make nothing twice
access/ has API keys, and the log of who changed what
servers checks store and broker when a process starts
"""
