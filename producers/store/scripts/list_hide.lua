#!lua flags=allow-oom
-- LIST_HIDE(ms) | messages that are taken: hidden for `ms` from now on, 0 gives them back; those that are gone:
-- nothing.
-- KEYS: hidden (zset)   ARGV: ms, id, ...
-- Answers: the number of messages
-- include: producers.connection/_now.lua
local now = now_ms()
local found = 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i])
    found = found + 1
  end
end
return found
