#!lua
-- REPLAY(letter, message) | the letter is on the dead-letter list: remove it, forget the task's earlier redeliveries,
-- and put the message at the end of its list; else nothing.
-- KEYS: dead, reaped, list   ARGV: letter, message, task id (or empty)
-- Answers: 1 sent | 0
if not redis.call('LPOS', KEYS[1], ARGV[1]) then
  return 0
end
-- The command that may fail (if the key is not a list) comes first: a script's effects are not rolled back.
redis.call('LPUSH', KEYS[3], ARGV[2])
redis.call('LREM', KEYS[1], 1, ARGV[1])
if ARGV[3] ~= '' then
  redis.call('HDEL', KEYS[2], ARGV[3])
end
return 1
