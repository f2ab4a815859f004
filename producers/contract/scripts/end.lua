#!lua flags=allow-oom
-- END(inc, me, since) | inc is silent here (see _alive.lua): its lease ends, and that is noted; else nothing.
-- ARGV: inc, me, the join since when lease values count (0: all do)
-- Answers: 1 it has no lease now | 0 it keeps it
-- include: _alive.lua
local lease = 'penstock:lease:' .. ARGV[1]
if redis.call('EXISTS', lease) == 0 then
  return 1
end
if not silent(ARGV[1], ARGV[2], ARGV[3]) then
  return 0
end
redis.call('DEL', lease)
note_taken(ARGV[1], '')
return 1
