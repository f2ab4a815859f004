#!lua
-- FILE_MADE(file) | its blob is noted as written, and no file has this id: its fields, its place in the lists of its
-- tenant's files and of those of its purpose, and its end are there; its bytes are counted, where its tenant's are; the
-- note is not. Else nothing of that. What its upload has reserved is given up, unless the answer is `late`.
-- KEYS: file, its tenant's files, those of its purpose, expiring, notes, bytes of its tenant's files, uploads
-- ARGV: id, end (unix s; 0: none), upload's name (or empty), field, value, ...
-- Answers: made | exists (also by this call) | late (the blob is not noted, or is to be deleted)
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HDEL', KEYS[7], ARGV[3])
  return 'exists'
end
if (tonumber(redis.call('ZSCORE', KEYS[5], ARGV[1])) or 0) == 0 then
  return 'late'
end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
if ARGV[2] ~= '0' then
  redis.call('ZADD', KEYS[4], ARGV[2], ARGV[1])
end
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('HDEL', KEYS[7], ARGV[3])
if redis.call('EXISTS', KEYS[6]) == 1 then
  redis.call('INCRBY', KEYS[6], redis.call('HGET', KEYS[1], 'size'))
end
return 'made'
