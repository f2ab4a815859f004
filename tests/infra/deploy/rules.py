"""Writes the PrometheusRule of `infra/kubernetes` anew: `python -m tests.infra.deploy.rules`.

kustomize cannot put one file into another, so the rules of `infra/prometheus/alerts.yml` are there twice. A test
compares the two. The chart reads the file itself.
"""

from __future__ import annotations

from tests.processes import ROOT

ALERTS = ROOT / "infra" / "prometheus" / "alerts.yml"
FILE = ROOT / "infra" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEAD = """# Written by `python -m tests.infra.deploy.rules`, from infra/prometheus/alerts.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: penstock
  namespace: penstock
  labels: {app.kubernetes.io/part-of: penstock}
spec:
"""


def text() -> str:
    """What the file has to be."""
    lines = ALERTS.read_text("utf-8").splitlines()
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
