"""The broker on SQS: SQS carries the messages, the store keeps the books (docs/how/sqs.md).

    operator ─▶ sending/ ─▶ index, SendMessage ─▶ one SQS queue for each tier of a version ─▶ receiver/ ─▶ consumer

address reads the URL; names has SQS's names of queues, keys those of the books; calls has the scripts
queues/ finds, makes and checks SQS queues; connection is what every blocking side works with
operator and consumer implement the faces of `producers.broker.base`; receiver/ is what a worker process has received
left gives back what dead workers left; repair keeps the index true
"""
