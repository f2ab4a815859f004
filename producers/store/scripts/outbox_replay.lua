#!lua flags=allow-oom
-- REPLAY | delivered or dead: due now, and its schedule begins anew. Waiting for its next try: due now. Held by a
-- process that tries it now: nothing. Name and webhook id stay.
-- KEYS: row, due (of webhooks), delivered, dead   ARGV: name
-- Answers: replayed | held | gone
-- include: producers.connection/_now.lua
-- include: _outbox_kept.lua
local r = redis.call('HMGET', KEYS[1], 'state', 'holder', 'source', 'tenant')
local waiting = r[3] and 'penstock:replies:' .. r[3] or KEYS[2]
if not r[1] then
  return 'gone'
end
local now = now_ms()
local due = r[1] == 'due'
if due and r[2] and tonumber(redis.call('ZSCORE', waiting, ARGV[1]) or '0') > now then
  return 'held'
end
if not due then
  redis.call('HSET', KEYS[1], 'state', 'due', 'tries', 0)
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[1])
  outbox_left(ARGV[1], r[4])
  if not r[3] then
    outbox_waits(r[4], 1)
  end
end
redis.call('HDEL', KEYS[1], 'holder')
redis.call('ZADD', waiting, now, ARGV[1])
if r[3] then
  redis.call('SADD', 'penstock:replies', r[3])
end
redis.pcall('PUBLISH', 'penstock:webhooks:wake', r[3] or '')
return 'replayed'
