"""A warm process that becomes the next worker: it has imported everything, and has neither model nor threads.

    Standby.start -> process imports, at low priority -> "ready" -> waits
    Child._spawn -> Standby.take -> argv, environment, output -> process: has anything changed? -> it is the worker

keeper starts the process and hands programs over; process is what runs there, with the list of imports (preload).
Imported by their own names: the process needs none of the keeper's.

The first one of `penstock up` begins with the first line of that command (`workers.processes.ahead`), at full priority.
The first worker is handed to it before it is ready, and becomes it as soon as it is.

What happens when a process dies:

| who dies | when | then |
| --- | --- | --- |
| supervisor | at any time | the kernel kills the standby (`guard`); elsewhere it reads an end of file and exits |
| standby | before it is taken | the next worker starts normally; after that start there is a new standby |
| standby | between the request and its answer | the supervisor reads an end of file and starts the worker normally |
| standby, stuck | it is ready, and does not answer within ANSWER_S | it is killed and reaped; a normal start |
| standby | after its answer | it was the worker by then, and is restarted as any |
| begun ahead | before the keeper has it | the keeper reads an end of file, and the first worker starts normally |
| begun ahead | stuck in its imports | a worker would be, too: there is no limit, and Ctrl-C kills it |
| `penstock up` | it refuses an option, before there is a keeper | it kills and reaps what it began |

A worker is never started twice: a standby whose answer did not come is dead before the normal start begins.
"""
