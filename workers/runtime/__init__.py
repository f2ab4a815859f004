"""One worker process, from its start to its end. A task's way through its threads, which a queue joins at each arrow:

    broker ──FETCH──▶ intake ─┬───── of clients, gateways, sources ────┬▶ claimer ──CLAIM──▶ store
                              └▶ main: Celery's consumer, EnginePool ──┘     │
    readers ◀─APPEND── publisher ◀──────── tokens, once a step ────────── engine
                          │ FINISH, won ─────────────────────────────────────────────┐
                          ▼ of plain senders, or to be let go                        │
                       finisher: Celery's tracer, then SETTLE; or RELEASE ──▶ store  │
                          │                                                          │
    broker ◀─ACK, BACK── acker ◀─────────────────────────────────────────────────────┘

What claimer finds done or held by others goes to acker at once. Who ends a task early only tells: control, main
(revoked) and housekeeper (deadline) the publisher; housekeeper (preempted, breaker) and drain the finisher.
`workers.state.delivery` has its stages.

worker loads and announces the model -> assembly makes the parts and starts their threads -> Celery's worker
watchdog and health watch it; signals hears that it is to end; drain ends it, part by part, in the reverse
of the order in which assembly starts them; aws and gpu_facts read the machine around it
"""
