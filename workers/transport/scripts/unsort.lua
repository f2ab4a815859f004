#!lua flags=allow-oom
-- UNSORT | no worker takes from these lists any more: what was sorted by tenant goes back to their fronts, in the order of
-- its arrival, so that a list's length says again how much waits.
-- KEYS: list ...   ARGV: how many, at most
-- Answers: how many went back; fewer than asked for: all
-- include: _unsort.lua
return unsort_all(KEYS, tonumber(ARGV[1]))
