#!lua flags=allow-oom
-- APPEND(c, i, tokens) | for each sequence, without raising. No record: `gone`. Other claim or final: `other`. Cancel:
-- `cancel`. i < next: `ok`, not published again. i > next, or the prompt's entries are missing (a failover lost a
-- tail): `resend(next)`. The server is too full for tokens of the task's tier (_memory.lua): `full`, nothing is
-- appended. Else append + publish. A text prompt's length is stored in the record, for the usage of a task
-- that ends without its worker.
-- One call carries a whole engine step, and the prompt lengths of newly started tasks.
-- KEYS: task, stream for each sequence
-- ARGV: for each sequence: id, claim, choice, i, scored (1: PROMPT came before), discarded (tokens of best_of's
--       candidates that are not among its choices), prompt (its length in tokens, 0: no news), run (_run.lua), count,
--       entry * count (stream entries, JSON arrays)
-- Answers: for each sequence: ok | gone | other | cancel | resend | full | error, and a number: the choice's next index
-- include: producers.connection/_now.lua
-- include: _run.lua
-- include: _memory.lua
local out, a = {}, 1
local now

local function append(task, stream, id, claim, choice, i, scored, discarded, prompt, run, first, last)
  local field = 'next:' .. choice
  local r = redis.call('HMGET', task, 'claim', 'end', 'cancel', field, 'first', 'prompt', 'tier')
  if r[1] ~= claim or r[2] then
    return redis.call('EXISTS', task) == 1 and 'other' or 'gone', 0
  end
  if prompt ~= '0' then
    redis.call('HSETNX', task, 'prompt_tokens', prompt)
  end
  note_run(task, run)
  local next = tonumber(r[4] or '0')
  if r[3] then
    return 'cancel', next
  end
  if i > next or (scored == '1' and not r[6]) then
    return 'resend', next
  end
  first = first + (next - i)
  if first > last then
    return 'ok', next
  end
  now = now or now_ms()
  if not may_write(r[7], now) then
    return 'full', next
  end
  local at = redis.call('XLEN', stream)
  for k = first, last do
    redis.call('XADD', stream, (at + 1 + k - first) .. '-0', 'e', ARGV[k])
  end
  next = next + last - first + 1
  if not r[5] then
    redis.call('HSET', task, field, next, 'first', now)
  else
    redis.call('HSET', task, field, next)
  end
  if discarded ~= '0' then
    redis.call('HSET', task, 'discarded', discarded)
  end
  redis.call('PUBLISH', 'penstock:tokens:' .. id, '[' .. at .. ',' .. table.concat(ARGV, ',', first, last) .. ']')
  return 'ok', next
end

for s = 1, #KEYS / 2 do
  local count = tonumber(ARGV[a + 8])
  local fine, answer, next = pcall(append, KEYS[2 * s - 1], KEYS[2 * s], ARGV[a], ARGV[a + 1], ARGV[a + 2],
    tonumber(ARGV[a + 3]), ARGV[a + 4], ARGV[a + 5], ARGV[a + 6], ARGV[a + 7], a + 9, a + 8 + count)
  out[#out + 1] = fine and answer or 'error'
  out[#out + 1] = fine and next or 0
  a = a + 9 + count
end
return out
