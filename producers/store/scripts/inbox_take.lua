#!lua
-- INBOX_TAKE(object) | an object that is not known: it is open, under this batch's id, and the newest of its name; else
-- nothing but that it is known for `ttl` seconds from now on.
-- KEYS: open objects of the place, known objects of this name   ARGV: stamp, batch's id, entry (JSON), ttl (seconds)
-- Answers: {1 | 0 (it was known), the id of its batch}
local known = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
if known then
  return { 0, known }
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2], 'newest', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return { 1, ARGV[2] }
