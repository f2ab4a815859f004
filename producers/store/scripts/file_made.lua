#!lua
-- FILE_MADE(file) | no file has this id: its fields, its place in the lists of all files and of its purpose, and its
-- end are there; else nothing.
-- KEYS: file, files, files of its purpose, expiring   ARGV: id, end (unix s; 0: none), field, value, ...
-- Answers: 1 made | 0 there was one
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
if ARGV[2] ~= '0' then
  redis.call('ZADD', KEYS[4], ARGV[2], ARGV[1])
end
return 1
