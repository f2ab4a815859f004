#!lua
-- BATCH_EXPAND(from) | `in_progress`, before its deadline, and expanded up to the line `from`: the records of the next
-- lines are made, `submitting`; lines with a bad body are counted as failed, with their errors; the cursor moves on. One
-- call, so a line has one record, and a bad line counts once. Else nothing.
-- KEYS: batch, refused lines, submitting, deadlines
-- ARGV: batch's id, from (line), lines, offset behind them in the input (bytes), bad lines, 2 * number of fields that
--       all records share, number of other fields; name, value, ... of those; names of these; for each task its id and
--       the values of these (an empty one: no such field); for each bad line its number and its error (JSON)
-- Answers: {the time of the records (ms)} | {} (nothing was done)
-- include: _batch.lua
-- include: _admit.lua
local batch, from, lines, bad = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local shared, others = tonumber(ARGV[6]), tonumber(ARGV[7])
local r = redis.call('HMGET', batch, 'status', 'line', 'deadline')
local now = now_ms()
if r[1] ~= 'in_progress' or tonumber(r[2]) ~= from or tonumber(r[3]) <= now then
  return {}
end
local names = 7 + shared
local a = names + others + 1
for _ = 1, lines - bad do
  local id = ARGV[a]
  local fields = { 'v', '1', 'status', 'submitting', 'created', now, 'deaths', 0, unpack(ARGV, 8, names) }
  for k = 1, others do
    if ARGV[a + k] ~= '' then
      fields[#fields + 1] = ARGV[names + k]
      fields[#fields + 1] = ARGV[a + k]
    end
  end
  a = a + others + 1
  local task = 'penstock:task:' .. id
  if redis.call('EXISTS', task) == 0 then
    admit(task, KEYS[3], KEYS[4], id, now, fields)
  end
end
for _ = 1, bad do
  redis.call('HSET', KEYS[2], ARGV[a], ARGV[a + 1])
  a = a + 2
end
redis.call('HSET', batch, 'line', from + lines, 'offset', ARGV[4])
if bad > 0 then
  redis.call('HINCRBY', batch, 'failed', bad)
end
return { now }
