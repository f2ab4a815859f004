"""The broker's side of the protocol: queues by tier, deliveries and leases, behind one interface.

    sender ─▶ Sender, Broker.send ─▶ queue by tier ─▶ Consumer.fetch ─▶ in flight ─▶ Consumer.put_down

base has the interface, values its arguments and results; connect chooses an implementation by URL
redis/ with its scripts is for Redis and Valkey; memory/ is the same in plain Python, for one process
"""
