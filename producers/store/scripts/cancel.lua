#!lua flags=allow-oom
-- CANCEL | no record, or final: not accepted; else the flag. A queued task that nobody live owns is final at once
-- (settled at its next CLAIM); one still `submitting` only gets the flag, because the sweeper re-sends no final
-- record, and without a message it would never be settled. What it only flags enters the index of deadlines.
-- KEYS: task, stream   ARGV: id
-- Answers: {accepted 0|1, status | gone}
-- include: _final.lua
-- include: _cancel.lua
return cancel(KEYS[1], KEYS[2], ARGV[1])
