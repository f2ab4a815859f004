#!lua flags=allow-oom
-- CANCEL | no record, or final: not accepted; else the record gets the flag. A queued task without a live owner is
-- final at once (settled at its next CLAIM). A `submitting` task only gets the flag: the sweeper sends no final record,
-- and without a message it would never be settled. A task that is only flagged enters the index of deadlines.
-- KEYS: task, stream   ARGV: id
-- Answers: {accepted 0|1, status | gone}
-- include: _final.lua
-- include: _cancel.lua
return cancel(KEYS[1], KEYS[2], ARGV[1])
