#!lua flags=allow-oom
-- EJECT(inc, pool) | inc may be held back by its breaker: it is entered, if it fails by itself, or if with it at most a
-- third of the pool's living workers are. Else it is not entered any more. Entries without a lease do not count, and
-- go. Said again, it answers for the pool as it is then.
-- KEYS: the pool's ejected   ARGV: inc, living workers of the pool with inc, it fails by itself 0|1
-- Answers: 1 held back | 0 it has to serve
local others = 0
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', 'penstock:lease:' .. worker) == 0 then
    redis.call('SREM', KEYS[1], worker)
  elseif worker ~= ARGV[1] then
    others = others + 1
  end
end
local granted = ARGV[3] == '1' or 3 * (others + 1) <= tonumber(ARGV[2])
redis.call(granted and 'SADD' or 'SREM', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], 3600)
return granted and 1 or 0
