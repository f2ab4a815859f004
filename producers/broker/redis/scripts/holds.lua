#!lua flags=allow-oom
-- HOLDS(inc) | broker lease alive: marks of prefixes are entered as held by it, so that FETCH sends tasks to it; others
-- are held no more. Anew: what it had entered before goes. Else nothing.
-- REAP removes what the dead have entered; that of an earlier release does not, and a failover may bring it back. So a
-- few entries are looked at each time, and removed if their holder has no lease; what an incarnation holds has a TTL.
-- KEYS: lease, held of inc, prefixes   ARGV: inc, anew 0|1, marks to enter, mark ... (those to enter first)
-- Answers: marks that it has entered now | -1 gone
-- include: _unhold.lua
if redis.call('EXISTS', KEYS[1]) == 0 then
  return -1
end
if ARGV[2] == '1' then
  unhold(ARGV[1])
end
for k = 4, #ARGV do
  local mark = ARGV[k]
  if k < 4 + tonumber(ARGV[3]) then
    redis.call('HSET', KEYS[2], mark, 1)
    redis.call('HSET', KEYS[3], mark, ARGV[1])
  else
    redis.call('HDEL', KEYS[2], mark)
    if redis.call('HGET', KEYS[3], mark) == ARGV[1] then
      redis.call('HDEL', KEYS[3], mark)
    end
  end
end
redis.call('PEXPIRE', KEYS[2], 3600000)
local some = redis.call('HRANDFIELD', KEYS[3], 16, 'WITHVALUES')
for k = 1, #some, 2 do
  if redis.call('EXISTS', 'penstock:lease:' .. some[k + 1]) == 0 then
    redis.call('HDEL', KEYS[3], some[k])
  end
end
return redis.call('HLEN', KEYS[2]) - redis.call('HEXISTS', KEYS[2], 'room')
