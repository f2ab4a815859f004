#!lua flags=no-writes
-- DEPTHS | the counts of lists and workers in the books; reads only.
-- KEYS: incarnations, dead, KV tokens of deliveries, delayed of a queue ...   ARGV: list ...
-- Answers: tokens, dead letters, { incarnation, its queue, its messages in flight, ... }, { messages of each
--          `delayed` }, then for each list { waiting, delayed, tenants, ms for which the oldest has waited (-1: none
--          waits) }
-- include: _index.lua
local workers, delayed, now = {}, {}, now_ms()
for k, said in ipairs(redis.call('HGETALL', KEYS[1])) do
  workers[#workers + 1] = said
  if k % 2 == 0 then
    workers[#workers + 1] = redis.call('HLEN', 'penstock:sqs:inflight:' .. workers[#workers - 1])
  end
end
for k = 4, #KEYS do
  delayed[k - 3] = redis.call('ZCARD', KEYS[k])
end
local out = { tonumber(redis.call('GET', KEYS[3]) or '0'), redis.call('LLEN', KEYS[2]), workers, delayed }
for _, list in ipairs(ARGV) do
  local index = 'penstock:sqs:waiting:' .. list
  local oldest = redis.call('ZRANGE', index, 0, 0, 'WITHSCORES')[2]
  local age = oldest and tonumber(oldest) <= now and now - tonumber(oldest) or -1
  local later = redis.call('ZCOUNT', index, '(' .. now, '+inf')
  local tenants = redis.call('HLEN', 'penstock:sqs:tenants:' .. list)
  out[#out + 1] = { redis.call('ZCARD', index) - later, later, tenants, age }
end
return out
