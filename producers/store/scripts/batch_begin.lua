#!lua flags=allow-oom
-- BATCH_BEGIN | `validating` -> `in_progress`, with the number of the input's lines; else nothing.
-- KEYS: batch   ARGV: total
-- Answers: the status then | gone
-- include: _batch.lua
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' then
  status = 'in_progress'
  redis.call('HSET', KEYS[1], 'status', status, 'total', ARGV[1], 'in_progress_at', now_ms())
end
return status or 'gone'
