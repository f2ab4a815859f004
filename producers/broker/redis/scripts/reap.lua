#!lua flags=allow-oom
-- REAP(inc) | broker lease absent: return its entries to the front, in the order in which they were fetched, as BACK
-- does, and forget what it holds. Each return is counted, because a worker killed between FETCH and CLAIM counts no
-- death on the record.
-- Early, with a looker: the lease is valid and inc is silent (see _alive.lua): its lease ends here, and the counted
-- returns are noted for RETRACT. Ordinary Celery tasks, which nothing fences, are delayed until the lease would have
-- lapsed.
-- KEYS: lease, in flight of inc, incarnations, reaped, returned, delayed
-- ARGV: inc, looker (or empty), the join from which on leases count
-- Answers: entries returned, or -1 while the lease is valid
-- include: producers.connection/_now.lua
-- include: _fair.lua
-- include: _unhold.lua
-- include: producers.contract/_alive.lua
local left = redis.call('PTTL', KEYS[1])
local early = left ~= -2
if early then
  if ARGV[2] == '' or not silent(ARGV[1], ARGV[2], ARGV[3]) then
    return -1
  end
  redis.call('DEL', KEYS[1])
  note_taken(ARGV[1], '')
end
local entries, flying = {}, redis.call('HGETALL', KEYS[2])
for k = 1, #flying, 2 do
  local e = cmsgpack.unpack(flying[k + 1])
  e.uuid = flying[k]
  entries[#entries + 1] = e
end
table.sort(entries, function(a, b) return a[1] > b[1] end)
for _, e in ipairs(entries) do
  if early and e[6] == 0 then
    redis.call('ZADD', KEYS[6], now_ms() + left, cmsgpack.pack({ e[2], e[4], e.uuid }))
  else
    redis.call('RPUSH', e[2], e[4])
  end
  if early then
    note_taken(ARGV[1], e[3])
  end
  redis.call('HINCRBY', KEYS[4], e[3], 1)
  if e[8] then
    redis.call('HSET', KEYS[5], e[3], e[8])
  end
  correct(e, 0)
end
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[1])
unhold(ARGV[1])
return #entries
