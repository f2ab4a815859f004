#!lua flags=allow-oom
-- REAP(inc) | lease absent: all its messages without a route (see OUT) get the route back, and enter the index unless
-- their records are settled; deliveries (not buffered messages) count a redelivery. Redeliveries of done messages are
-- forgotten. The requests to SQS follow, then REAPED.
-- Early, with a looker, if inc is silent (see _alive.lua) and has no plain Celery tasks, which cannot be kept back: its
-- lease ends here, and the counted redeliveries are noted for RETRACT.
-- KEYS: lease, in flight of inc, reaped, incarnations
-- ARGV: inc, looker (or empty), the join from which on leases count
-- Answers: {-1} while the lease is valid; else messages to which this call gave a route, then field, entry (JSON),
--          ... of all that are in flight. Without any, the incarnation is forgotten.
-- include: _index.lua
-- include: producers.contract/_alive.lua
local now, out, flying = now_ms(), { 0 }, redis.call('HGETALL', KEYS[2])
local early = redis.call('EXISTS', KEYS[1]) == 1
if early then
  local takes = ARGV[2] ~= '' and silent(ARGV[1], ARGV[2], ARGV[3])
  for k = 2, #flying, 2 do
    takes = takes and cjson.decode(flying[k]).member ~= ''
  end
  if not takes then
    return { -1 }
  end
  redis.call('DEL', KEYS[1])
  note_taken(ARGV[1], '')
end
for k = 1, #flying, 2 do
  local field, e = flying[k], cjson.decode(flying[k + 1])
  if not e.out then
    e.out = 'back'
    out[1] = out[1] + 1
    if field:sub(1, 2) ~= 'm:' and e.id ~= '' then
      redis.call('HINCRBY', KEYS[3], e.id, 1)
      if early then
        note_taken(ARGV[1], e.id)
      end
    end
    local r = redis.call('HMGET', 'penstock:task:' .. e.id, 'status', 'settled')
    if e.member ~= '' and not r[2] then
      local at = tonumber(e.at)
      enter(e.list, e.member, math.min(at > 0 and at or now, now))
    end
    redis.call('HSET', KEYS[2], field, cjson.encode(e))
  elseif e.out == 'done' or e.out == 'letter' then -- its worker's DOWN will not come
    redis.call('HDEL', KEYS[3], e.id)
  end
  out[#out + 1], out[#out + 2] = field, cjson.encode(e)
end
if not flying[1] then
  redis.call('HDEL', KEYS[4], ARGV[1])
end
return out
