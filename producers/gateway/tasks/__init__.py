"""`/v1/tasks`: routes submits, shows, follows and cancels; views and outcome are what callers are shown.

large bounds the memory that big answers take; foreground holds tasks whose caller waits on the connection: OpenAI's
endpoints use it too
"""
