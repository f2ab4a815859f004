#!lua flags=allow-oom
-- JOIN(me) | me is heard here: one more has joined. Each worker that sees it renews its lease, and values that are
-- written from now on say so; else nothing.
-- A count that was lost alone goes on from the clock, in ms: above all that counting ever came to.
-- ARGV: me
-- Answers: the number of this join | 0 me is not heard
-- include: _alive.lua
-- include: producers.connection/_now.lua
if not hear(ARGV)[ARGV[1]] then
  return 0
end
redis.call('SET', 'penstock:joins', string.format('%d', now_ms()), 'NX')
return redis.call('INCR', 'penstock:joins')
