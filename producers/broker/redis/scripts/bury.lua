#!lua flags=allow-oom
-- BURY(message) | it waits in the list: it becomes a dead letter, and its task's redeliveries are forgotten; else
-- nothing.
-- KEYS: list, dead, reaped, returned   ARGV: message, task id, reason
-- Answers: 1 buried | 0
-- include: producers.connection/_now.lua
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[4], ARGV[2])
local letter = { reason = ARGV[3], list = KEYS[1], at = now_ms(), message = ARGV[1] }
redis.call('RPUSH', KEYS[2], cjson.encode(letter))
return 1
