#!lua flags=allow-oom
-- LEAD(me) | no leader, or `me` leads: `me` leads for `ms` from now; else nothing.
-- KEYS: lease   ARGV: me, ms
-- Answers: 0 (`me` leads) | the ms left of another leader's lease
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then
  return math.max(1, redis.call('PTTL', KEYS[1]))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
