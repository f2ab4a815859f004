"""Commands for whoever operates a system: dlq, drain, rollout, usage, chaos, bench. servers opens what they ask."""
