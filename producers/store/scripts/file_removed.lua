#!lua flags=allow-oom
-- FILE_REMOVED(file) | nothing is known of the file. Its blob is the caller's to delete, after this.
-- KEYS: file, files, files of its purpose, expiring   ARGV: id
-- Answers: 1 | 0 there was none
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
return redis.call('UNLINK', KEYS[1])
