#!lua flags=allow-oom
-- DOWN(field) | the entry exists, on a route out: remove it from those in flight. Called once SQS has done its part. An
-- entry without a route lost it in a failover, and maybe more: it stays, and is found as a stray. For a deleted message
-- the redeliveries are forgotten, and its entry in the index is removed, unless its record is not settled: then that
-- entry is of a retry's copy.
-- KEYS: in flight of inc, reaped, task   ARGV: field, task id, list, member of the index (or empty), deleted 0|1
-- Answers: 1 | 0
-- include: _index.lua
local packed = redis.call('HGET', KEYS[1], ARGV[1])
if not packed or not cjson.decode(packed).out then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[2], ARGV[2])
  local r = redis.call('HMGET', KEYS[3], 'status', 'settled')
  if ARGV[4] ~= '' and (r[2] or not r[1]) then
    leave(ARGV[3], ARGV[4])
  end
end
return 1
