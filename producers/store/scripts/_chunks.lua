-- Included by _final.lua alone, before `finalise`. A task of more texts than one worker takes at once is a parent,
-- whose chunks are tasks of their own (`producers/store/chunks.py` says what their records have). Whatever makes a chunk
-- final appends what the parent's stream lacks, in order, in the same script: no death leaves one without the other.
local finalise

-- The id of a parent's chunk, from 0: a function of both.
local function chunk_id(parent, number)
  local h = redis.sha1hex(parent .. ':' .. number)
  return string.sub(h, 1, 8) .. '-' .. string.sub(h, 9, 12) .. '-8' .. string.sub(h, 14, 16) .. '-8'
    .. string.sub(h, 18, 20) .. '-' .. string.sub(h, 21, 32)
end

-- Calls `each` with the key and the id of chunks `from` to `to` of a parent. No task has more than 512.
local function chunks_each(parent, from, to, each)
  for number = from, math.min(to, 512) - 1 do
    local id = chunk_id(parent, number)
    if each('penstock:task:' .. id, id, number) then
      return
    end
  end
end

local function usage_of(chunk)
  local r = redis.call('HMGET', chunk, 'usage', 'started', 'prompt_tokens')
  return tonumber(r[1] and string.match(r[1], '"prompt_tokens":(%d+)') or r[2] and r[3] or nil) or 0
end

-- The tokens of a parent's texts that workers began with.
local function chunks_used(parent, written)
  local used = 0
  chunks_each(parent, 0, tonumber(written) or 0, function(chunk)
    used = used + usage_of(chunk)
  end)
  return used
end

-- A chunk's error (JSON), by the numbers that its texts have in the parent. `fields`: where its message names fields.
local function chunk_error(err, offset, texts)
  local fine, e = pcall(cjson.decode, err)
  if not fine or type(e) ~= 'table' or type(e.message) ~= 'string' or e.code == 'expired' then
    return err
  end
  local number, behind = string.match(e.message, '^input%[(%d+)(%].*)$')
  if number then
    e.message = string.format('input[%.0f', number + offset) .. behind
    e.fields = { { 0, 'input' } }
  else
    local first = string.format('input[%.0f] to ', offset)
    e.message = string.format('%sinput[%.0f]: ', first, offset + texts - 1) .. e.message
    e.fields = { { 0, 'input' }, { #first, 'input' } }
  end
  return cjson.encode(e)
end

-- Ends a parent as one of its chunks ended, or as `failed`. The sweeper cancels the others.
local function chunks_fail(parent, id, status, reasons, err)
  local written = redis.call('HGET', parent, 'written')
  finalise(parent, 'penstock:stream:' .. id, id, status, reasons, err, chunks_used(id, written), 0)
end

-- Appends the entries of the parent's next chunks that have completed. The last one completes the parent; one that ended
-- otherwise, or is lost, ends it.
local function chunks_join(parent, id)
  local stream = 'penstock:stream:' .. id
  local r = redis.call('HMGET', parent, 'status', 'chunks', 'written')
  if not r[1] or r[1] ~= 'queued' and r[1] ~= 'in_progress' or not r[2] then
    return
  end
  local total, written, at = tonumber(r[2]), tonumber(r[3]), redis.call('XLEN', stream)
  local failed
  chunks_each(id, at, written, function(chunk, name, number)
    local c = redis.call('HMGET', chunk, 'status', 'offset', 'texts', 'reasons', 'error', 'end')
    if not c[1] then
      failed = { 'failed', '[]', '{"code":"chunk_lost","message":"Texts of this task are gone from the store."}' }
    elseif c[6] and c[1] ~= 'completed' then
      failed = { c[1], c[4] or '[]', chunk_error(c[5] or 'null', tonumber(c[2]), tonumber(c[3])) }
    elseif c[6] then
      local entry = string.format('{"chunk":%d,"offset":%d,"texts":%d,"task":"%s"}', number, c[2], c[3], name)
      local added = redis.pcall('XADD', stream, (at + 1) .. '-0', 'e', entry)
      if type(added) == 'table' and string.find(added.err, 'equal or smaller', 1, true) then -- no script wrote what it has
        failed = { 'failed', '[]', '{"code":"chunk_lost","message":"The stream of this task takes no more texts."}' }
        return true
      elseif type(added) == 'table' then
        error(added.err)
      end
      tell(parent, id, string.format('[%d,%s]', at, entry))
      at = at + 1
      return false
    end
    return true
  end)
  if failed then
    chunks_fail(parent, id, unpack(failed))
  elseif at == total then
    finalise(parent, stream, id, 'completed', '["stop"]', 'null', chunks_used(id, written), 0)
  end
end

-- A chunk has just become final. One that did not complete ends its parent, whichever chunks are before it.
local function chunk_ended(chunk, id, status, reasons, err)
  local parent = 'penstock:task:' .. id
  if status == 'completed' then
    return chunks_join(parent, id)
  end
  local before = redis.call('HGET', parent, 'status')
  if before == 'queued' or before == 'in_progress' then
    local c = redis.call('HMGET', chunk, 'offset', 'texts')
    chunks_fail(parent, id, status, reasons, chunk_error(err, tonumber(c[1]), tonumber(c[2])))
  end
end
