-- Shared by CLAIM, FINISH, CANCEL and EXPIRE. The script that makes a record final also appends the terminal entry, so
-- that no reader ever sees one without the other. It writes the end's rows into the ledger and the outbox, settles
-- what accounts were charged, counts a batch's line, and counts the task no more among those that wait. The end of a
-- chunk goes on with its parent. A parent has no row in the ledger: its chunks have.
-- include: _followers.lua
-- include: _ledger.lua
-- include: _limits.lua
-- include: _outbox.lua
-- include: _waiting.lua
-- include: producers.connection/_now.lua
-- include: _chunks.lua
local FINAL = { completed = true, failed = true, cancelled = true, incomplete = true }

local EXPIRED = '{"code":"expired","message":"The deadline passed before the task was finished."}'

-- The prompt tokens in the usage of a task that ends without a worker's FINISH: its prompt, once it was started.
-- Of a parent, what was begun of its texts.
local function prompt_used(task)
  local r = redis.call('HMGET', task, 'started', 'prompt_tokens', 'written')
  if r[3] then
    return chunks_used(string.sub(task, #'penstock:task:' + 1), r[3])
  end
  return r[1] and r[2] or 0
end

-- Appends the terminal entry. Returns its position: behind all others, also where one has a number that no script gave it.
local function append_end(stream, entry)
  local at = redis.call('XLEN', stream)
  if type(redis.pcall('XADD', stream, (at + 1) .. '-0', 'e', entry)) == 'table' then
    at = string.match(redis.call('XADD', stream, '*', 'e', entry), '^%d+') - 1
  end
  return at
end

-- silent: no event is told, for the task is about to be deleted. result: JSON, what a task that generates nothing made.
function finalise(task, stream, id, status, reasons, err, prompt, cached, silent, result)
  local r = redis.call('HMGET', task, 'n', 'discarded', 'batch', 'reserved', 'created', 'chunks', 'parent')
  -- No task has more than 64 choices: a record that says 10^11 must not keep the store busy for hours.
  local n, out = math.min(tonumber(r[1] or '1'), 64), tonumber(r[2] or '0')
  local longest = 0
  for c = 0, n - 1 do
    local tokens = tonumber(redis.call('HGET', task, 'next:' .. c) or '0')
    out, longest = out + tokens, math.max(longest, tokens)
  end
  local usage = string.format('{"prompt_tokens":%d,"cached_tokens":%d,"output_tokens":%d}', prompt, cached, out)
  local entry = '{"end":"' .. status .. '","reasons":' .. reasons .. ',"usage":' .. usage .. ',"error":' .. err
    .. (result and ',"result":' .. result or '') .. '}'
  local at = append_end(stream, entry)
  redis.call('HSET', task, 'status', status, 'end', status, 'finished', now_ms(),
    'reasons', reasons, 'usage', usage, 'error', err)
  redis.call('ZREM', 'penstock:submitting', id)
  redis.call('ZREM', 'penstock:deadlines', id)
  redis.call('ZADD', 'penstock:unsettled', now_ms(), id)
  tell(task, id, '[' .. at .. ',' .. entry .. ']')
  if not r[6] then
    ledger_row(task, id, status, prompt, cached, out, longest)
  end
  if r[4] then
    settle_charge(task, r[4], prompt, cached, out, tonumber(r[5]), now_ms())
  end
  if not silent then
    outbox_task(task, id, status)
  end
  wait_ends(task)
  if r[3] and redis.call('HEXISTS', 'penstock:batch:' .. r[3], 'status') == 1 then
    redis.call('HINCRBY', 'penstock:batch:' .. r[3], status == 'completed' and 'completed' or 'failed', 1)
  end
  if r[7] then
    chunk_ended(task, r[7], status, reasons, err)
  end
end
