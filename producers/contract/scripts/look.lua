#!lua flags=no-writes,allow-oom
-- LOOK(me, since, incs) | me is heard here: tells which incarnations are silent (see _alive.lua) or have no lease; else
-- nothing.
-- ARGV: me, the join since when lease values count (0: all do), inc ...
-- Answers: {0} where me is not heard; else {1}, then for each: 0 it lives, as far as is known | 1 silent | 2 no lease
-- include: _alive.lua
local since = table.remove(ARGV, 2)
local heard = hear(ARGV)
if not heard[ARGV[1]] then
  return { 0 }
end
local out = { 1 }
for k = 2, #ARGV do
  local about = heard[ARGV[k]] or redis.call('GET', 'penstock:lease:' .. ARGV[k])
  out[k] = about == true and 0 or not about and 2 or listens(about, since) and 1 or 0
end
return out
