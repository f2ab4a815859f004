"""The broker on SQS: SQS carries the messages, the store keeps the books (docs/sqs.md).

    sender -> index, SendMessage -> one SQS queue for each tier of a model version -> hold/ -> consumer -> worker

address reads the URL; names has SQS's names of queues, keys those of the books; calls has the scripts
queues finds and checks SQS queues; wanted says how they should be, setup makes them so; check, health look at them
connection is what every blocking side works with; sending sends, batcher gathers what is sent at the same time
operator and consumer implement the faces of `producers.broker.base`; hold/ is what a worker process has received
left gives back what dead workers left; repair keeps the index true
celery puts Celery's own messages (links, chords) into queues that are none of a model version's
"""
