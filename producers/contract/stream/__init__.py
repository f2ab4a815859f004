"""A task's stream: events, the blocks that a compacted stream has, and the result they sum to."""
