-- include: _kept.lua
-- Shared by SETTLE, ORPHAN and FINISH. It marks the record as settled, clears claim and owner, and starts the TTL of record and
-- stream. The stream outlives its record by a minute, so that a reader of the record finds the stream. The sweeper
-- compacts it by its time of settlement; a stream that is not compacted within a day is left to its TTL. An invalid TTL
-- counts as the default, so that no record stays for ever. Chunks stay two minutes longer than their parent.
local function settle(task, stream, id, default_ttl)
  local r = redis.call('HMGET', task, 'settled', 'ttl', 'written')
  if not r[1] then
    local now = now_ms()
    redis.call('HSET', task, 'settled', now)
    local ttl = tonumber(r[2])
    if not ttl or ttl % 1 ~= 0 then
      ttl = tonumber(default_ttl)
    end
    kept_ends(task, stream, now, ttl)
    redis.call('EXPIRE', task, ttl)
    redis.call('EXPIRE', stream, ttl + 60)
    chunks_each(id, 0, tonumber(r[3] or nil) or 0, function(chunk, name)
      local status = redis.call('HMGET', chunk, 'status', 'settled')
      if status[2] then
        redis.call('EXPIRE', chunk, ttl + 120)
        redis.call('EXPIRE', 'penstock:stream:' .. name, ttl + 180)
        redis.call('EXPIRE', 'penstock:result:' .. name, ttl + 180)
        local moved = redis.call('HGET', 'penstock:result:' .. name, 'blob')
        if moved then -- as COMPACT notes it, for a later time; notes are due after 6 h
          redis.call('ZADD', 'penstock:files:notes', math.ceil(now / 1000) + ttl + 240 - 21600, cjson.decode(moved).name)
        end
      elseif status[1] then
        redis.call('HSET', chunk, 'ttl', ttl + 120)
      end
    end)
    redis.call('ZADD', 'penstock:settled', now, id)
    redis.call('ZREMRANGEBYSCORE', 'penstock:settled', '-inf', now - 86400000)
  end
  redis.call('ZREM', 'penstock:unsettled', id)
  redis.call('HDEL', task, 'claim', 'owner', 'followers')
end
