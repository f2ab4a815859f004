#!lua flags=allow-oom
-- RETRACT(inc) | inc was ended by another while its worker lived: the returns that REAP counted are taken back, once.
-- KEYS: the broker's count of returns, if this is the broker   ARGV: inc
-- Answers: {0} it was not; else {1}, then the tasks whose messages were returned
local taken = 'penstock:taken:' .. ARGV[1]
local noted = redis.call('HGETALL', taken)
if not noted[1] then
  return { 0 }
end
local out = { 1 }
for k = 1, #noted, 2 do
  local task, raised = noted[k], tonumber(noted[k + 1])
  if task ~= '' then
    out[#out + 1] = task
  end
  if task ~= '' and raised > 0 and KEYS[1] then
    redis.call('HSET', taken, task, 0)
    if redis.call('HINCRBY', KEYS[1], task, -raised) <= 0 then
      redis.call('HDEL', KEYS[1], task)
    end
  end
end
return out
