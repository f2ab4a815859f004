"""The runner for accelerators: what a step needs is kept there, and made there."""
