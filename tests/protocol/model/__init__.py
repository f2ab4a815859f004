"""Executable specification of Penstock's task protocol, and an exhaustive checker of it.

`scripts` are the atomic steps on a task's record; `world` holds broker, leases and workers and lists every step that
may come next (`worker`, `fleet`, `outside`, `reader`, `outbox` are its parts); `checks` says what must never be seen
and what the good end is; `search` visits every state within a scenario's budget of faults (`scenarios`), with all
`rules` or some, and takes those for one that differ in names alone (`canon`), as which of two workers is which.
`python -m tests.protocol.model --help` runs it.

  S1 a token is appended only on top of what its author saw; indexes are contiguous, each once (fence, no mixing)
  S2 one FINISH wins; a final record never changes, is never made again     S3 an accepted cancel ends `cancelled`
  S4 links go out at most once unless the owner was lost before SETTLE; and, with S5,
  S5 from EVERY reachable state the quiet, good end (final, settled, links sent, no message or delivery left, nothing
     for the sweeper, reader served) can be reached by fair steps alone, no fault helping; by strong fairness it is
  S6 a reader gets what the stream holds, each index once, the terminal entry last
  S7 deaths <= faults that happened; a message that kills its workers kills no more than its scenario allows
  S8 whoever is told that a task was accepted finds the task that it asked for
  S9 a message that kills its workers harms no other task: none but itself is given up
  S10 a task is given up only if it was taken up again and again and nothing came of it, or too often in all
  S11 a task whose reader lives is not cancelled for a lease that was renewed; without a reader, none is left
  S12 past its deadline a task that was ever taken up is incomplete, and any other fails
  S13 what a live worker has sorted by tenant is left to it: turns are kept
  S14 a task that is cancelled waits for no worker where none has it
  S15 a task that runs was queued, by its record's times
  S16 what was begun goes on in its version, and in its pool while that has a live worker that is not held back; what
      was sent to a version runs in that; what waits for a pool waits for one with a live worker;
      what needs a later release runs on none before it
  S17 a final record has its rows in the outbox, a row its final; a first start has its row, once
  S18 a row is marked as delivered only if its receiver got it; its deliverer is not overruled while its lease stands.
      With S5: each row is delivered at last, or dead
  S22 a living worker is taken for dead only if it lost its alive connections while it was suspended; it then takes the
      counts back (S7)   S23 what is returned early is not refused for an owner whose lease stands on the store
  S24 the counts of what waits have each task that is submitting or queued, once, and no other
  S26 a plain message that needs a later release is left to it while a worker of that lives
  S25 a task that was deleted is not made again, and leaves no row; with S5, nor a result where Celery has results
  S27 a revocation that a sweeper hears takes nothing from a live worker; with S3, what it ends stays cancelled
  S28 with S5, whoever sends a settled plain task again finds its result, and the engine does not run
  S29 a reader learns of what was appended by messages, not by silence, unless its worker died and the next one is of
      a release before
  S19 on SQS a task that is not settled is in the index, in a worker's books or stored, whatever SQS has
  S20 the index has nothing that does not wait, unless SQS or a process failed  S21 a message leaves one dead letter

Identifiers (delivery, claim, incarnation) are the smallest ones that nobody remembers: "fresh" without infinity. They,
and the numbers of workers and slots, are given anew in each state: in a trace they hold from one step to the next.
"""

from tests.protocol.model.rules import ALL, RULES
from tests.protocol.model.scenarios import SCENARIOS
from tests.protocol.model.search import Verdict, explore

__all__ = ["ALL", "RULES", "SCENARIOS", "Verdict", "explore"]
