"""The broker on SQS: SQS carries the messages, the store keeps the books (docs/how/sqs.md).

    operator ─▶ sending: index, SendMessage ─▶ one SQS queue for each tier of a version ─▶ receiver/ ─▶ consumer

operator and consumer implement the interface of `producers.broker.base`; receiver/ is shared by a process's consumers
address reads the URL and names the SQS queues; keys has the store's keys of the books
queues finds SQS queues and checks their settings; specs says how queues should be, setup makes them so
check looks at SQS before a process starts and while it runs; operator also mends what dead workers and lost replies
leave
"""
