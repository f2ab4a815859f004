"""A warm process that becomes the next worker: it has imported everything, and has neither model nor threads.

    Standby.start -> process imports, at low priority -> "ready" -> waits
    Child._spawn -> Standby.take -> argv, environment, output -> process: has anything changed? -> it is the worker

keeper starts the process and hands programs over; process is what runs there, with the list of imports (preload) and
the stamp of the code that it has read (stamp).

What happens when a process dies:

| who dies | when | then |
| --- | --- | --- |
| supervisor | at any time | the kernel kills the standby (`guard`); elsewhere it reads an end of file and exits |
| standby | before it is taken | the next worker starts normally; after that start there is a new standby |
| standby | between the request and its answer | the supervisor reads an end of file and starts the worker normally |
| standby, stuck | it does not answer within ANSWER_S | it is killed and reaped, then the worker starts normally |
| standby | after its answer | it was the worker by then, and is restarted as any |

A worker is never started twice: a standby whose answer did not come is dead before the normal start begins.
"""

from workers.processes.standby.keeper import IDLE_S, Standby

__all__ = ["IDLE_S", "Standby"]
