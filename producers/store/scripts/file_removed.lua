#!lua flags=allow-oom
-- FILE_REMOVED(file) | the file is gone, its bytes are not counted any more, and a note says that its blob is to be
-- deleted. With a time: only if the blob was noted by then, else nothing: somebody has noted it anew. Nor if there is a
-- file: the note is of one who made it again after a kill, and goes.
-- A file that was there enters the index of what was erased, for the journal (`producers.backup.journal`).
-- Also for a file that was never made: its note said that a blob was being written, and now says the same.
-- KEYS: file, its tenant's files, those of its purpose, expiring, notes, bytes of its tenant's files
-- ARGV: id, noted by (unix s; empty: in any case)
-- Answers: 1 | 0 there was no file | -1 nothing was done
if ARGV[2] ~= '' then
  local noted = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[1]))
  if not noted or noted > tonumber(ARGV[2]) then
    return -1
  end
  if redis.call('EXISTS', KEYS[1]) == 1 then
    redis.call('ZREM', KEYS[5], ARGV[1])
    return -1
  end
end
local there = redis.call('EXISTS', KEYS[1]) == 1
if there or redis.call('ZSCORE', KEYS[5], ARGV[1]) then
  redis.call('ZADD', KEYS[5], 0, ARGV[1])
end
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 and there and redis.call('EXISTS', KEYS[6]) == 1 then
  redis.call('DECRBY', KEYS[6], redis.call('HGET', KEYS[1], 'size') or 0)
end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('UNLINK', KEYS[1])
if there then
  local t = redis.call('TIME')
  redis.call('ZADD', 'penstock:erasing', t[1] * 1000 + math.floor(t[2] / 1000), ARGV[1])
end
return there and 1 or 0
