"""SQS's queues themselves: found, made, and looked at.

    a list ─▶ lookup: its URL, and whether the queue fits        wanted ─▶ setup: how queues should be, and make them so

check looks at a broker before a process starts; health while it runs, for /readyz
"""
