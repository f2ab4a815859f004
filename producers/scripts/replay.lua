#!lua
-- REPLAY(letter, message) | the letter is on the dead-letter list: take it off, forget what became of the task's earlier
-- deliveries, put the message at the end of its list; else nothing.
-- KEYS: dead, reaped, list   ARGV: letter, message, task id (or empty)
-- Answers: 1 sent | 0
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then
  return 0
end
if ARGV[3] ~= '' then
  redis.call('HDEL', KEYS[2], ARGV[3])
end
redis.call('LPUSH', KEYS[3], ARGV[2])
return 1
