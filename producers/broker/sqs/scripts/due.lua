#!lua flags=allow-oom
-- DUE(sent) | removes what was `sent`; then reads messages whose delay is over, for their sender: nobody else reads
-- them for a while. If it dies before it says that they were sent, the next one sends them, too.
-- KEYS: delayed of a queue   ARGV: most messages, ms for which they are the caller's, every 0|1: also what is not due,
--                                  what was sent ...
-- Answers: message (JSON {list, body}) ...
-- include: producers.connection/_now.lua
for k = 4, #ARGV do
  redis.call('ZREM', KEYS[1], ARGV[k])
end
local now = now_ms()
local last = ARGV[3] == '1' and '+inf' or now
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', last, 'LIMIT', 0, ARGV[1])
for _, entry in ipairs(due) do
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), entry)
end
return due
