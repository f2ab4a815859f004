"""Commands for whoever operates a system: dlq, tenants, drain, chaos, bench."""
