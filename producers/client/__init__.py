"""The client library: submit a task, follow its tokens, fetch its result, cancel it.

submission and operations are written once, without I/O: they yield steps, and blocking and aio carry them out
reader reads one task's stream, then follows its channel;
its hub shares one pub/sub connection among a process's readers
blocking runs the asyncio reader on a thread
leases end tasks whose readers are gone, and elect one process of several
"""
