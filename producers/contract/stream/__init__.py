"""A task's stream: its events, also as the blocks of a compacted stream, and the result that they sum to."""
