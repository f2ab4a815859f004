#!lua
-- BATCH_CREATE | no batch of this id, and fewer than `most_open` of its tenant have not ended -> `validating`; else
-- nothing. A field `idempotency` names the entry of the request's Idempotency-Key (IDEMPOTENT): it is marked as made. It
-- enters its tenant's open batches. A batch with a tenant enters its tenant's index, too, which loses what is before
-- `oldest`. Where that has `most_kept`, the oldest ones that have ended are forgotten for it; their files stay.
-- KEYS: batch, open batches, index, the tenant's open batches
-- ARGV: id, completion window (s), oldest id in an index, time (s) that a batch stays in one, most_open (0: any number),
--       most_kept, field, value, ...
-- Answers: new | exists | full
-- include: _batch.lua
-- include: _made.lua
local most_open, most_kept = tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'exists'
end

-- The tenant's batches that have not ended. One that is gone leaves the set.
local function open_now()
  local count = 0
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    local status = redis.call('HGET', 'penstock:batch:' .. id, 'status')
    if not status then
      redis.call('SREM', KEYS[4], id)
    elseif not ENDED[status] then
      count = count + 1
    end
  end
  return count
end

-- Forgets the oldest batches that have ended, so that the index has room for one more.
local function make_room(own)
  local over = redis.call('ZCARD', own) - most_kept + 1
  if over <= 0 then
    return
  end
  local looked = math.min(over + redis.call('SCARD', KEYS[4]), over + 1000)
  for _, id in ipairs(redis.call('ZRANGE', own, 0, looked - 1)) do
    local status = redis.call('HGET', 'penstock:batch:' .. id, 'status')
    local tidy = redis.call('SISMEMBER', KEYS[4], id) == 0
    if over > 0 and tidy and (not status or ENDED[status]) then
      redis.call('UNLINK', 'penstock:batch:' .. id)
      redis.call('ZREM', own, id)
      redis.call('ZREM', KEYS[3], id)
      over = over - 1
    end
  end
end

if most_open > 0 and redis.call('SCARD', KEYS[4]) >= most_open and open_now() >= most_open then
  return 'full'
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'v', 1, 'status', 'validating', 'created', now, 'window', ARGV[2],
  'deadline', now + ARGV[2] * 1000, 'line', 0, 'offset', 0, 'written', 0, 'written_offset', 0, 'completed', 0,
  'failed', 0, 'outputs', 0, 'errors', 0, 'lapsed', 0, unpack(ARGV, 7))
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
local entry, tenant = unpack(redis.call('HMGET', KEYS[1], 'idempotency', 'tenant'))
if tenant then
  local own = KEYS[3] .. ':' .. tenant
  redis.call('ZREMRANGEBYLEX', own, '-', '(' .. ARGV[3])
  make_room(own)
  redis.call('ZADD', own, 0, ARGV[1])
  redis.call('EXPIRE', own, ARGV[4])
end
if entry then
  made(entry)
end
return 'new'
