"""The state of models and their workers: cards and their files, profiles, scaling decisions, rollouts.

publish, or a worker ─▶ cards: cards, files, profiles;  autoscaler ─▶ scaling;  operator ─▶ rollouts
"""
