#!lua flags=allow-oom
-- HOLD(ids) | each is entered, or renewed where it is: its reader lease ends `lease` ms from now.
-- Called before ADMIT, so that no task of a reader is ever without a lease, and then for all readers of a process at once.
-- KEYS: readers   ARGV: lease (ms), id, ...
-- Answers: how many were entered anew
local t = redis.call('TIME')
local over = t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ARGV[1])
local new = 0
for i = 2, #ARGV do
  new = new + redis.call('ZADD', KEYS[1], over, ARGV[i])
end
return new
