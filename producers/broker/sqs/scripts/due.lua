#!lua flags=allow-oom
-- DUE(sent) | removes the `sent` messages; then reads messages whose delay is over, and reserves them for the caller
-- for a while. If it dies before it reports them as sent, the next caller sends them, too.
-- KEYS: delayed of a queue   ARGV: messages at most, ms of the reservation, every 0|1: also messages that are not due,
--                                  sent message ...
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
