#!lua
-- BATCH_EXPAND(from) | `in_progress`, before its deadline, and expanded up to the line `from`: the records of the next
-- lines are made, `submitting`; lines with a bad body are counted as failed, with their errors; the cursor moves on.
-- One call, so a line has one record, and a bad line counts once. Else nothing.
-- Nor are lines made for which the tenant's open batches have no room: those of them all that are in the store
-- (expanded, and not written) may be `most` lines with `most_bytes` bytes of input, and the vectors, labels and scores
-- of these may take `most_results` bytes. A line that is alone is made.
-- With accounts, each line is charged to them where its record is made. A line that they have no budget for is a failed
-- one. The first line that another limit keeps off, or for which the server has no room (_memory.lua), and those behind
-- it, are left for later.
-- KEYS: batch, refused lines, submitting, deadlines, then the accounts that are charged
-- ARGV: batch's id, from (line), lines, error of a line without budget (JSON), most lines, bytes and bytes of results of
--       the tenant, 2 * number of fields that all records share, number of other fields; name, value, ... of those; names of these; then for each line the offset behind
--       it in the input (bytes) and its task's id, with the values of these (an empty one: no such field) and what the
--       accounts are asked for (JSON; empty: nothing), or an empty id with its error (JSON)
-- Answers: {the time of the records (ms), lines that are done, then the numbers of those without budget} | {} (nothing)
-- include: _batch.lua
-- include: _admit.lua
-- include: _limits.lua
-- include: _memory.lua
local batch, from, lines, spent = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local most, most_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_results, shared, others = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local r = redis.call('HMGET', batch, 'status', 'line', 'deadline', 'tenant', 'offset')
local now = now_ms()
if r[1] ~= 'in_progress' or tonumber(r[2]) ~= from or tonumber(r[3]) <= now then
  return {}
end
local names = 9 + shared
local a = names + others + 1
local offset, bad, answer = nil, 0, { now, 0 }

local function refuse(line, error)
  redis.call('HSET', KEYS[2], line, error)
  bad = bad + 1
end

-- The fields of the line's record at ARGV[a].
local function fields_at()
  local fields = { 'v', '1', 'status', 'submitting', 'created', now, 'deaths', 0, unpack(ARGV, 10, names) }
  for k = 1, others do
    if ARGV[a + 1 + k] ~= '' then
      fields[#fields + 1] = ARGV[names + k]
      fields[#fields + 1] = ARGV[a + 1 + k]
    end
  end
  return fields
end

local function number_of(fields, name)
  for k = 1, #fields, 2 do
    if fields[k] == name then
      return tonumber(fields[k + 1]) or 0
    end
  end
  return 0
end

local room, room_bytes, results, own_results = most, most_bytes, 0, 0

-- Makes the record of a line, if there is room and its accounts allow it. Answers: nil | the limit that is reached |
-- storage
local function make(id)
  local task, asked, fields = 'penstock:task:' .. id, ARGV[a + others + 2], fields_at()
  if redis.call('EXISTS', task) == 1 then
    return nil
  end
  local bytes = number_of(fields, 'result_bytes')
  if bytes > 0 and results > 0 and results + bytes > most_results then
    return 'storage'
  end
  local full = reserve('line', fields, number_of(fields, 'tokens'), now)
  if full then
    return full[1]
  end
  if asked ~= '' then
    local said, reserved, shortened = charge({ unpack(KEYS, 5) }, cjson.decode(asked), now)
    if said[1] ~= 'new' then
      return said[1]
    end
    charged_fields(fields, reserved, shortened)
  end
  admit(task, KEYS[3], KEYS[4], id, now, fields)
  results, own_results = results + bytes, own_results + bytes
end

for _, other in ipairs(redis.call('SMEMBERS', 'penstock:batches:open:' .. (r[4] or ''))) do
  local its = 'penstock:batch:' .. other
  local at = redis.call('HMGET', its, 'line', 'written', 'offset', 'written_offset', 'result_bytes')
  if at[1] then
    room, room_bytes = room - (at[1] - at[2]), room_bytes - (at[3] - at[4])
    results = results + (at[1] ~= at[2] and tonumber(at[5] or nil) or 0)
  end
end
for line = from, from + lines - 1 do
  local behind, id = ARGV[a], ARGV[a + 1]
  if line - from >= room or behind - r[5] > room_bytes then
    break
  end
  if id == '' then
    refuse(line, ARGV[a + 2])
    a = a + 3
  else
    local said = make(id)
    if said == 'budget_tokens' or said == 'budget_money' then
      refuse(line, spent)
      answer[#answer + 1] = line
    elseif said then
      break
    end
    a = a + others + 3
  end
  offset, answer[2] = behind, line - from + 1
end
if offset then
  redis.call('HSET', batch, 'line', from + answer[2], 'offset', offset)
end
if own_results > 0 then
  redis.call('HINCRBY', batch, 'result_bytes', own_results)
end
if bad > 0 then
  redis.call('HINCRBY', batch, 'failed', bad)
end
return answer
