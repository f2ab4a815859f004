#!lua flags=allow-oom
-- HOLD(ids) | each id's reader lease is taken or renewed: it ends `lease` ms from now.
-- Called before ADMIT, so that a reader's task always has a lease; then for all readers of a process at once.
-- KEYS: readers   ARGV: lease (ms), id, ...
-- Answers: the number of new leases
local t = redis.call('TIME')
local over = t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ARGV[1])
local new = 0
for i = 2, #ARGV do
  new = new + redis.call('ZADD', KEYS[1], over, ARGV[i])
end
return new
