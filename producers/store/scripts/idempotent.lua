#!lua
-- IDEMPOTENT(digest, made) | an unknown key: it stands for this digest and this id, for `ttl` seconds; else nothing.
-- Called before something is made with the id that this answers. Whoever makes it sets the field `made` in the same
-- script (ADMIT), or calls MADE afterwards.
-- KEYS: entry   ARGV: digest, id, ttl (seconds)
-- Answers: {new | known | made, id, time of the first call (ms)} | {conflict} (the key stands for another digest)
-- include: producers.connection/_now.lua
local entry = KEYS[1]
local known = redis.call('HMGET', entry, 'digest', 'id', 'at', 'made')
if known[1] then
  if known[1] ~= ARGV[1] then
    return { 'conflict' }
  end
  return { known[4] and 'made' or 'known', known[2], known[3] }
end
local now = now_ms()
redis.call('HSET', entry, 'digest', ARGV[1], 'id', ARGV[2], 'at', now)
redis.call('EXPIRE', entry, ARGV[3])
return { 'new', ARGV[2], tostring(now) }
