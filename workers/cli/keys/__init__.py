"""`penstock keys` and `penstock audit`: who may do what, and who changed it. They need the store, and no gateway."""
