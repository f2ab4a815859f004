"""`/v1/tasks`: routes submits, shows, follows and cancels tasks; views and outcome build the answers.

submit makes a task, once for each Idempotency-Key; large limits the memory of large answers; foreground runs tasks
whose caller waits on the connection, for OpenAI's endpoints
"""
