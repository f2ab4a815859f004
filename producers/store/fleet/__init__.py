"""The state of models and their workers: cards and their files, profiles, scaling decisions, rollouts.

publish, or a worker ─▶ cards, model_files;  workers ─▶ profiles;  autoscaler ─▶ scaling;  operator ─▶ rollouts
"""
