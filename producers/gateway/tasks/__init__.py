"""`/v1/tasks`: routes submits, lists, shows, follows, cancels and retries tasks; views and outcome build the answers.

submit makes a task, once for each Idempotency-Key; ownership finds what is the caller's, and cancels it;
large limits the memory of large answers; foreground runs tasks whose caller waits on the connection, for OpenAI's
endpoints
"""
