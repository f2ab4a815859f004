#!lua flags=allow-oom
-- BATCH_CLOSE | the batch has ended, and its parts and its lines' tasks are removed: it leaves the open batches, also its
-- tenant's, and is kept for `kept` seconds. Else nothing.
-- KEYS: batch, open batches, parts, begun parts, refused lines   ARGV: batch's id, kept
-- Answers: 1 | 0
-- include: _batch.lua
local status, tenant = unpack(redis.call('HMGET', KEYS[1], 'status', 'tenant'))
if status and not ENDED[status] then
  return 0
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('SREM', 'penstock:batches:open:' .. (tenant or ''), ARGV[1])
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
