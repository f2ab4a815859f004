#!lua
-- CHUNKS(from) | a parent that is not final, and of which `from` chunks are made: the records of the next ones are made,
-- `submitting`. One call, so a chunk has one record. The parent was charged and checked by ADMIT, for all of them. Else
-- nothing. With the last of them the task is accepted; until then the sweeper may end it (PARENT).
-- KEYS: parent, submitting, deadlines
-- ARGV: parent's id, from, chunks, 2 * number of fields that all of them share, number of other fields; name, value, ...
--       of those; names of these; then for each chunk the values of these (an empty one: no such field)
-- Answers: {status, chunks that are made} | {gone, 0}
-- include: producers.connection/_now.lua
-- include: _final.lua
-- include: _admit.lua
local parent, id, from, count = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local shared, others = tonumber(ARGV[4]), tonumber(ARGV[5])
local r = redis.call('HMGET', parent, 'status', 'chunks', 'written')
if not r[1] or not r[2] then
  return { 'gone', 0 }
end
if FINAL[r[1]] or tonumber(r[3]) ~= from or from + count > tonumber(r[2]) then
  return { r[1], tonumber(r[3]) }
end
local now, names = now_ms(), 5 + shared
local a = names + others
for number = from, from + count - 1 do
  local chunk = chunk_id(id, number)
  local fields = { 'v', '1', 'status', 'submitting', 'created', now, 'deaths', 0, 'parent', id, 'chunk', number,
    unpack(ARGV, 6, names) }
  for k = 1, others do
    if ARGV[a + k] ~= '' then
      fields[#fields + 1] = ARGV[names + k]
      fields[#fields + 1] = ARGV[a + k]
    end
  end
  wait_ends('penstock:task:' .. chunk) -- of an earlier task of its parent's id, which it outlives (_settle.lua)
  redis.call('UNLINK', 'penstock:task:' .. chunk)
  admit('penstock:task:' .. chunk, KEYS[2], KEYS[3], chunk, now, fields)
  a = a + others
end
redis.call('HSET', parent, 'written', from + count, 'written_at', now)
return { r[1], from + count }
