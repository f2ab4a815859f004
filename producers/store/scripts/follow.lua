#!lua flags=allow-oom
-- FOLLOW(process, tasks) | of each task that has not ended: from now on, what is published of it is published to this
-- process, too (_followers.lua), whose channel has a listener before it calls. Or it is no more.
-- That lasts until nobody listens there any more, or the task is settled. A task has at most MOST followers; others hear
-- of it on its own channel.
-- KEYS: task, ...   ARGV: process, 1 from now on | 0 no more
-- Answers: for each task: 1 it is published to the process | 0 it is not
-- include: _followers.lua
local MOST = 8

local process, on = ARGV[1], ARGV[2] == '1'
local out = {}
for k, task in ipairs(KEYS) do
  local status, ended, followers = unpack(redis.call('HMGET', task, 'status', 'end', 'followers'))
  local count, mine = 0, false
  for other in string.gmatch(followers or '', '%S+') do
    count, mine = count + 1, mine or other == process
  end
  if mine and not on then
    unfollow(task, process)
    mine = false
  elseif on and not mine and status and not ended and count < MOST then
    follow(task, followers, process)
    mine = true
  end
  out[k] = mine and 1 or 0
end
return out
