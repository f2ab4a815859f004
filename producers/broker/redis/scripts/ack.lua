#!lua flags=allow-oom
-- ACK(uuid) | the entry exists: remove; else nothing. With a reason, the message is kept on the dead-letter list. The
-- tenant's charge is corrected to the tokens that were used.
-- For a task that its worker has settled, the record must be settled, if this server holds it: a failover may have lost
-- that, and removing the message would leave a task that no worker finishes.
-- KEYS: in flight of inc, reaped, dead, task   ARGV: uuid, reason (or empty), tokens used, settled 0|1
-- Answers: 1 removed | 0 | -1 not settled here
-- include: producers.connection/_now.lua
-- include: _fair.lua
local packed = redis.call('HGET', KEYS[1], ARGV[1])
if not packed then
  return 0
end
if ARGV[4] == '1' then
  local r = redis.call('HMGET', KEYS[4], 'status', 'settled')
  if r[1] and not r[2] then
    return -1
  end
end
local e = cmsgpack.unpack(packed)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], e[3])
correct(e, math.max(1, tonumber(ARGV[3])))
if ARGV[2] ~= '' then
  local letter = { reason = ARGV[2], list = e[2], at = now_ms(), message = e[4] }
  redis.call('RPUSH', KEYS[3], cjson.encode(letter))
end
return 1
