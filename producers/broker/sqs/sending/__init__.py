"""The way of a message to SQS.

    outgoing: index, SendMessageBatch        batcher: gathers what is sent at the same time, for asyncio

celery puts Celery's own messages (links, chords) into queues that are none of a model version's
"""
