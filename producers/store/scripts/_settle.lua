-- Shared by SETTLE and ORPHAN: settled, claim and owner gone; record and stream TTL start here. The stream outlives its
-- record for a minute, so that whoever has read the one finds the other. Who compacts finds it by when it was settled;
-- what nobody came for in a day is left to its TTL. A TTL that is none is the default: it must not stay for ever.
local function settle(task, stream, id, default_ttl)
  local r = redis.call('HMGET', task, 'settled', 'ttl')
  if not r[1] then
    local now = now_ms()
    redis.call('HSET', task, 'settled', now)
    local ttl = tonumber(r[2])
    if not ttl or ttl % 1 ~= 0 then
      ttl = tonumber(default_ttl)
    end
    redis.call('EXPIRE', task, ttl)
    redis.call('EXPIRE', stream, ttl + 60)
    redis.call('ZADD', 'penstock:settled', now, id)
    redis.call('ZREMRANGEBYSCORE', 'penstock:settled', '-inf', now - 86400000)
  end
  redis.call('ZREM', 'penstock:unsettled', id)
  redis.call('HDEL', task, 'claim', 'owner')
end
