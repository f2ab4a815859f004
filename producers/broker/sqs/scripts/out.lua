#!lua flags=allow-oom
-- OUT(field, route) | the entry exists without a route out: it gets this one, and the store gets its part of the
-- outcome, once. Called before the request to SQS, so that whoever finishes the route knows that request.
--   back    SQS shows its message again: it is in the index, from `delay` ms after now on, unless its record is settled
--   delay   SQS deletes its message: the store keeps it until it is due and sent again
--   letter  SQS deletes its message: it is a dead letter
--   done    SQS deletes its message: nobody needs it
-- A task that its worker has settled must be settled in its record: a failover may have lost that.
-- KEYS: in flight of inc, delayed of the queue, dead, task
-- ARGV: field, route, list that it goes to, delay (ms), member of the index (or empty), body to keep, reason,
--       settled 0|1
-- Answers: 1 | 0 no such entry, or on another route | -1 not settled
-- include: _index.lua
local packed = redis.call('HGET', KEYS[1], ARGV[1])
if not packed then
  return 0
end
local e, way, now = cjson.decode(packed), ARGV[2], now_ms()
if e.out then
  return e.out == way and 1 or 0
end
local r = redis.call('HMGET', KEYS[4], 'status', 'settled')
if ARGV[8] == '1' and r[1] and not r[2] then
  return -1
end
if way == 'back' and ARGV[5] ~= '' and not r[2] then
  local delay, at = tonumber(ARGV[4]), tonumber(e.at)
  enter(ARGV[3], ARGV[5], delay > 0 and now + delay or math.min(at > 0 and at or now, now))
elseif way == 'delay' then
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[6])
elseif way == 'letter' then
  redis.call('RPUSH', KEYS[3], cjson.encode({ reason = ARGV[7], list = e.list, at = now, message = ARGV[6] }))
end
e.out = way
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(e))
return 1
