-- Shared by APPEND, FOLLOW and all that publishes. A record's `followers` names the processes that read its task
-- (FOLLOW), with spaces between. Each has a channel of its own, where one message tells of many tasks: lines, by turns a
-- task's id and what its own channel would say. An empty line says to listen to the task's own channel, and to read its
-- stream: its worker gave it back, or the message is LARGE.
-- Scripts that may not be called again publish by `pcall`: a user who may not publish must not leave an end half written.
-- Who listens reads the stream after 5 s of silence, and what waits for a wake looks by itself.
local LARGE = 65536 -- bytes; one is sent once: of a few, the reader drops what it heard, and reads the stream anyway

local function follow(task, followers, process)
  redis.call('HSET', task, 'followers', followers and followers .. ' ' .. process or process)
end

local function unfollow(task, process)
  local others = {}
  for other in string.gmatch(redis.call('HGET', task, 'followers') or '', '%S+') do
    if other ~= process then
      others[#others + 1] = other
    end
  end
  if others[1] then
    redis.call('HSET', task, 'followers', table.concat(others, ' '))
  else
    redis.call('HDEL', task, 'followers')
  end
end

-- Publishes lines to processes. One that nobody hears for has died, or lost its connection and will FOLLOW again: it is
-- forgotten.
local function tell_followers(followers, lines)
  local message = table.concat(lines, '\n')
  for process in string.gmatch(followers, '%S+') do
    if redis.pcall('PUBLISH', 'penstock:tokens:@' .. process, message) == 0 then
      for k = 1, #lines, 2 do
        unfollow('penstock:task:' .. lines[k], process)
      end
    end
  end
end

-- Publishes a message of one task.
local function tell(task, id, message)
  redis.pcall('PUBLISH', 'penstock:tokens:' .. id, message)
  local followers = redis.call('HGET', task, 'followers')
  if followers then
    tell_followers(followers, { id, #message > LARGE and '' or message })
  end
end
