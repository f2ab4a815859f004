"""`penstock autoscaler`, the process, and `penstock scale`: what it decided and why."""
