#!lua flags=allow-oom
-- BATCH_FINALIZE | `in_progress`, and all lines have ended or the deadline has passed: `finalizing`; else nothing.
-- No line is expanded after it.
-- KEYS: batch
-- Answers: the status then | gone
-- include: _batch.lua
local r = redis.call('HMGET', KEYS[1], 'status', 'line', 'total', 'completed', 'failed', 'deadline', 'written')
if r[1] ~= 'in_progress' then
  return r[1] or 'gone'
end
local now = now_ms()
local ended = r[2] == r[3] and (r[4] + r[5] >= tonumber(r[3]) or r[7] == r[3])
if not ended and tonumber(r[6]) > now then
  return r[1]
end
redis.call('HSET', KEYS[1], 'status', 'finalizing', 'finalizing_at', now)
return 'finalizing'
