"""A worker's lease, and what is done about those that lapsed.

housekeeper, a thread, goes round: lease renews this worker's own; neighbours sees a killed worker before its lease
lapses, and looks after dead workers, orphaned queues and the pool's slower or faster workers (for the breaker)
lease also gives back deliveries that a failover brought back; tasks end at their deadline or go on elsewhere
control receives cancels on a thread of its own; its subscriptions show that this process is alive
"""
