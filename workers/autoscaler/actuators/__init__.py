"""Actuators: what starts and ends workers. A pool has one: local processes, Kubernetes, ECS, an EC2 group, or none."""
