"""Commands for whoever operates a system: dlq, drain, chaos, bench."""
