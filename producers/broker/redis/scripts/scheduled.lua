#!lua flags=no-writes
-- SCHEDULED | what was sent back with a delay and is not due, soonest first, at most as many as asked for; reads only.
-- KEYS: delayed   ARGV: how many
-- Answers: message ...
local messages = {}
for i, packed in ipairs(redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1)) do
  messages[i] = cmsgpack.unpack(packed)[2]
end
return messages
