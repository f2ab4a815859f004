#!lua flags=allow-oom
-- HOLD(ids) | each id's reader lease is taken or renewed: it ends `lease` ms from now.
-- Called before ADMIT, so that a reader's task always has a lease; then for all readers of a process at once.
-- KEYS: readers   ARGV: lease (ms), id, ...
-- Answers: the number of new leases
-- include: producers.connection/_now.lua
local over = now_ms() + tonumber(ARGV[1])
local new = 0
for i = 2, #ARGV do
  new = new + redis.call('ZADD', KEYS[1], over, ARGV[i])
end
return new
