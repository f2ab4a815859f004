#!lua flags=allow-oom
-- MEASURE(source, before, mark) | the source's mark is not `mark` yet, and is `before`, if that is given: the increments
-- are added to the models' hashes, and its mark is `mark`. Else nothing: a reply was lost, or another process has
-- counted the same rows. A hash with `most` fields gets no new ones. What is no number in a hash stays as it is.
-- KEYS: mark, hash of a model, ...
-- ARGV: before ('' for any; '0-0' for none), mark, TTL (s) of marks and hashes, most fields of a hash, then for each
--       hash: count, (field, increment) * count
-- Answers: 1 added | 0 not
local mark = redis.call('GET', KEYS[1])
if mark == ARGV[2] or ARGV[1] ~= '' and (mark or '0-0') ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
local a, most = 5, tonumber(ARGV[4])
for k = 2, #KEYS do
  local hash, count = KEYS[k], tonumber(ARGV[a])
  for i = a + 1, a + 2 * count, 2 do
    if redis.call('HLEN', hash) < most or redis.call('HEXISTS', hash, ARGV[i]) == 1 then
      redis.pcall('HINCRBY', hash, ARGV[i], ARGV[i + 1])
    end
  end
  redis.call('EXPIRE', hash, ARGV[3])
  a = a + 1 + 2 * count
end
return 1
