#!lua flags=allow-oom
-- QUEUED | `submitting` -> `queued`; else nothing.
-- KEYS: task, submitting   ARGV: id
-- Answers: the status then | gone
local status = redis.call('HGET', KEYS[1], 'status')
redis.call('ZREM', KEYS[2], ARGV[1])
if not status then
  return 'gone'
end
if status ~= 'submitting' then
  return status
end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'status', 'queued', 'queued', t[1] * 1000 + math.floor(t[2] / 1000))
return 'queued'
