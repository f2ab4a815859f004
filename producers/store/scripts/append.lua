#!lua flags=allow-oom
-- APPEND(c, i, tokens) | for each sequence, without raising. No record: `gone`. Other claim or final: `other`. Cancel:
-- `cancel`. i < next: `ok`, not published again. i > next, or the prompt's entries are missing (a failover lost a
-- tail): `resend(next)`. The server is too full for tokens of the task's tier (_memory.lua): `full`, nothing is
-- appended. Else append + publish. A text prompt's length is stored in the record, for the usage of a task
-- that ends without its worker.
-- One call carries a whole engine step, and the prompt lengths of newly started tasks.
-- It runs for every token of every stream. What is nearly always so is compared and written as the strings that it came
-- in: a number that goes into a command is printed for that, which takes as long as a command on a short hash.
-- KEYS: task, stream for each sequence
-- ARGV: for each sequence: id, claim, field (`next:<choice>`), i, next (i + count), more, count, entry * count (stream
--       entries, JSON arrays). more: empty, or: scored (1: PROMPT came before), discarded (tokens of best_of's
--       candidates that are not among its choices), prompt (its length in tokens, 0: no news), run (_run.lua)
-- Answers: for each sequence: ok | gone | other | cancel | resend | full | error, and a number: the choice's next index
-- include: producers.connection/_now.lua
-- include: _run.lua
-- include: _memory.lua
local call, concat = redis.call, table.concat
local out, a = {}, 1
local now

local function append(task, stream, id, claim, field, i, after, more, first, last)
  local r = call('HMGET', task, 'claim', 'end', 'cancel', field, 'n', 'prompt')
  if r[1] ~= claim or r[2] then
    return call('EXISTS', task) == 1 and 'other' or 'gone', 0
  end
  local scored, discarded = '0', '0'
  if more ~= '' then
    local prompt, run
    scored, discarded, prompt, run = string.match(more, '^(%d) (%d+) (%d+) (.*)$')
    if prompt ~= '0' then
      call('HSETNX', task, 'prompt_tokens', prompt)
    end
    note_run(task, run)
  end
  local next = r[4] or '0'
  if r[3] then
    return 'cancel', next
  end
  if next ~= i and tonumber(i) > tonumber(next) or scored == '1' and not r[6] then
    return 'resend', next
  end
  if next ~= i then
    first = first + tonumber(next) - tonumber(i)
  end
  if first > last then
    return 'ok', next
  end
  now = now or now_ms()
  if not may_write(task, now) then
    return 'full', next
  end
  -- Of a task with one choice and no entries of its prompt, the stream has its tokens alone.
  local at = (r[5] or '1') == '1' and not r[6] and next or call('XLEN', stream)
  local message
  if first == last and at == i then
    call('XADD', stream, after .. '-0', 'e', ARGV[last])
    message = '[' .. i .. ',' .. ARGV[last] .. ']'
  else
    for k = first, last do
      call('XADD', stream, (at + 1 + k - first) .. '-0', 'e', ARGV[k])
    end
    message = '[' .. at .. ',' .. concat(ARGV, ',', first, last) .. ']'
  end
  if discarded ~= '0' then
    call('HSET', task, field, after, 'discarded', discarded)
  else
    call('HSET', task, field, after)
  end
  if next == '0' then
    call('HSETNX', task, 'first', now)
  end
  call('PUBLISH', 'penstock:tokens:' .. id, message)
  return 'ok', after
end

for s = 1, #KEYS / 2 do
  local count = tonumber(ARGV[a + 6])
  local fine, answer, next = pcall(append, KEYS[2 * s - 1], KEYS[2 * s], ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3],
    ARGV[a + 4], ARGV[a + 5], a + 7, a + 6 + count)
  out[2 * s - 1] = fine and answer or 'error'
  out[2 * s] = fine and next or 0
  a = a + 7 + count
end
return out
