"""What a task's stream holds: events, the blocks that a compacted stream has, and the result they sum to."""
