#!lua
-- BATCH_CREATE | no batch of this id -> `validating`; else nothing. A field `idempotency` names the entry of the
-- request's Idempotency-Key (IDEMPOTENT): it is marked as made. A batch with a tenant enters its tenant's index, too,
-- which loses what is before `oldest`.
-- KEYS: batch, open batches, index   ARGV: id, completion window (s), oldest id in an index, time (s) that a batch
--       stays in one, field, value, ...
-- Answers: new | exists
-- include: _batch.lua
-- include: _made.lua
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'exists'
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'v', 1, 'status', 'validating', 'created', now, 'window', ARGV[2],
  'deadline', now + ARGV[2] * 1000, 'line', 0, 'offset', 0, 'written', 0, 'written_offset', 0, 'completed', 0,
  'failed', 0, 'outputs', 0, 'errors', 0, 'lapsed', 0, unpack(ARGV, 5))
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
local entry, tenant = unpack(redis.call('HMGET', KEYS[1], 'idempotency', 'tenant'))
if tenant then
  local own = KEYS[3] .. ':' .. tenant
  redis.call('ZADD', own, 0, ARGV[1])
  redis.call('ZREMRANGEBYLEX', own, '-', '(' .. ARGV[3])
  redis.call('EXPIRE', own, ARGV[4])
end
if entry then
  made(entry)
end
return 'new'
