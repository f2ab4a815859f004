#!lua flags=allow-oom
-- REAP(inc) | broker lease absent: return its entries to the front, in the order in which they were fetched, as BACK does.
-- Each return is counted, because a worker killed between FETCH and CLAIM counts no death on the record.
-- KEYS: lease, in flight of inc, incarnations, reaped, returned   ARGV: inc
-- Answers: entries returned, or -1 while the lease is alive
-- include: _fair.lua
if redis.call('EXISTS', KEYS[1]) == 1 then
  return -1
end
local entries = {}
for _, packed in ipairs(redis.call('HVALS', KEYS[2])) do
  entries[#entries + 1] = cmsgpack.unpack(packed)
end
table.sort(entries, function(a, b) return a[1] > b[1] end)
for _, e in ipairs(entries) do
  redis.call('RPUSH', e[2], e[4])
  redis.call('HINCRBY', KEYS[4], e[3], 1)
  if e[8] then
    redis.call('HSET', KEYS[5], e[3], e[8])
  end
  correct(e, 0)
end
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[1])
return #entries
