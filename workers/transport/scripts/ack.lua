-- ACK(uuid) | the entry exists: remove; else nothing. With a reason, the message is kept on the dead-letter list. What
-- its tenant was charged is set right by the tokens that were used.
-- KEYS: in flight of inc, reaped, dead   ARGV: uuid, reason (or empty), tokens used
-- Answers: 1 removed | 0
-- include: _fair.lua
local packed = redis.call('HGET', KEYS[1], ARGV[1])
if not packed then
  return 0
end
local e = cmsgpack.unpack(packed)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], e[3])
correct(e, math.max(1, tonumber(ARGV[3]))) -- nothing is for nothing
if ARGV[2] ~= '' then
  local t = redis.call('TIME')
  redis.call('RPUSH', KEYS[3], cjson.encode({
    reason = ARGV[2], list = e[2], at = t[1] * 1000 + math.floor(t[2] / 1000), message = e[4] }))
end
return 1
