#!lua flags=allow-oom
-- UNTAKEN(source, age) | replies that have been due for longer than `age`, and nobody took them: dead, with the tries
-- that they have. They may be replayed. At most `limit` in a call. A source of which nothing is due leaves the set.
-- KEYS: due replies of the source, dead, sources   ARGV: source, age (ms), limit
-- Answers: the number of rows
-- include: producers.connection/_now.lua
-- include: _outbox_kept.lua
local now = now_ms()
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2], 'LIMIT', 0, ARGV[3])
for _, name in ipairs(names) do
  redis.call('ZREM', KEYS[1], name)
  if redis.call('EXISTS', 'penstock:webhooks:row:' .. name) == 1 then
    redis.call('HSET', 'penstock:webhooks:row:' .. name, 'state', 'dead')
    outbox_ended('dead', name, redis.call('HGET', 'penstock:webhooks:row:' .. name, 'tenant'), now)
  end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SREM', KEYS[3], ARGV[1])
end
return #names
