#!lua flags=no-writes
-- SCHEDULED | reads the delayed messages that are not due, soonest first.
-- KEYS: delayed   ARGV: messages at most
-- Answers: message ...
local messages = {}
for i, packed in ipairs(redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1)) do
  messages[i] = cmsgpack.unpack(packed)[2]
end
return messages
