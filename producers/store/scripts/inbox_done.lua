#!lua flags=allow-oom
-- INBOX_DONE(batch) | the object is open: it is not any more; with `forget`, it is not known either: the same content
-- may come again. Else nothing.
-- KEYS: open objects of the place, known objects of this name   ARGV: stamp, batch's id, forget 0|1
-- Answers: 1 | 0
if redis.call('HDEL', KEYS[1], ARGV[2]) == 0 then
  return 0
end
if ARGV[3] == '1' and redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return 1
