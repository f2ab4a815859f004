"""The broker on SQS: each tier of a model version is one SQS queue.

address reads the URL; names has SQS's names of queues, keys those of the books in the store
queues finds and checks SQS queues; wanted says how they should be, setup makes them so
celery puts Celery's own messages (links, chords) into queues that are none of a model version's
"""
