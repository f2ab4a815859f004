"""`penstock keys`, `audit` and `tenants`: who may do what and how much, and who changed it. They need no gateway."""
