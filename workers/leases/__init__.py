"""A worker's lease, and what is done about those that lapsed.

incarnation: one life of a worker; housekeeper renews its lease, reaps dead workers, ends what is late or cancelled
reconcile gives back deliveries that a failover brought back
"""
