"""The files of `infra/` that deploy Penstock, checked offline: by the schema of what reads them, and against the code.

kustomize.py   renders overlays          keda.py      schemas of KEDA's resources
code.py        what the code takes: commands, environment variables, metrics
pods.py        what pods and the objects around them have to be
"""
