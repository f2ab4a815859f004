#!lua flags=allow-oom
-- LEAD(me) | nobody leads, or I do: I lead for `ms` from now; else nothing.
-- KEYS: sweeper   ARGV: me, ms
-- Answers: 0 I lead | for how many ms another leads, if it is not heard of
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then
  return math.max(1, redis.call('PTTL', KEYS[1]))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
