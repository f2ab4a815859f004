#!lua flags=allow-oom
-- QUEUED | `submitting` -> `queued`; else nothing.
-- KEYS: task, submitting   ARGV: id
-- Answers: the status then | gone
-- include: _queued.lua
return queued(KEYS[1], KEYS[2], ARGV[1])
