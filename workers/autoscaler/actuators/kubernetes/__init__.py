"""The actuator on Kubernetes: it sets the number of a Deployment's pods, and says which of them go first.

    scale(wanted, first) ─▶ pods (listed by the selector of the scale) ─▶ deletion costs ─▶ the Deployment's scale

A pod that goes gets SIGTERM, and its worker drains. Rights: get and patch of deployments/scale, list and patch of pods;
with list of horizontalpodautoscalers it also refuses to work against one. The Deployment itself is never read.
"""

from workers.autoscaler.actuators.kubernetes.deployment import open_url

__all__ = ["open_url"]
