#!lua flags=allow-oom
-- APPEND(c, i, tokens) | for each sequence, without raising. No record: `gone`. Other claim or final: `other`. Cancel:
-- `cancel`. i < next: `ok`, not published again. i > next, or the prompt's entries are missing (a failover lost a
-- tail): `resend(next)`. The server is too full for tokens of the task's tier (_memory.lua): `full`, nothing is
-- appended. Else append + publish. A text prompt's length is stored in the record, for the usage of a task
-- that ends without its worker.
-- One call carries a whole engine step, and the prompt lengths of newly started tasks. What it appends to tasks that the
-- same processes follow (FOLLOW) is one message to each of these; the tasks' own channels then have only what somebody
-- listens to there.
-- It runs for every token of every stream. What is nearly always so is compared and written as the strings that it came
-- in: a number that goes into a command is printed for that, which takes as long as a command on a short hash.
-- KEYS: task, stream for each sequence
-- ARGV: for each sequence: id, claim, field (`next:<choice>`), i, next (i + count), more, count, entry * count (stream
--       entries, JSON arrays). more: empty, or: scored (1: PROMPT came before), discarded (tokens of best_of's
--       candidates and of beams that are not among its choices, 0: no news), prompt (its length in tokens, 0: no
--       news), run (_run.lua)
-- Answers: for each sequence: ok | gone | other | cancel | resend | full | denied (an ACL forbids it) | error, and a
--       number: the choice's next index
-- include: producers.connection/_now.lua
-- include: _run.lua
-- include: _memory.lua
-- include: _followers.lua
local call, concat = redis.call, table.concat
local out, a = {}, 1
local now
-- The lines for each set of followers, and their bytes so far. They are sent before they have more than MOST bytes.
local lines_of, bytes_of, MOST = {}, {}, 65536

local function publish(followers, lines)
  local channels = {}
  for k = 1, #lines / 2 do
    channels[k] = 'penstock:tokens:' .. lines[2 * k - 1]
  end
  local heard = redis.pcall('PUBSUB', 'NUMSUB', unpack(channels)) -- of a user who may not ask, all are published
  for k, channel in ipairs(channels) do
    if heard.err or heard[2 * k] > 0 then
      call('PUBLISH', channel, lines[2 * k])
    end
  end
  tell_followers(followers, lines)
end

local function publish_later(followers, id, message)
  local lines, bytes = lines_of[followers], #message
  if lines and bytes + bytes_of[followers] > MOST then
    publish(followers, lines)
    lines = nil
  end
  if not lines then
    lines = {}
    lines_of[followers], bytes_of[followers] = lines, 0
  end
  lines[#lines + 1] = id
  lines[#lines + 1] = message
  bytes_of[followers] = bytes + bytes_of[followers]
end

local function append(task, stream, id, claim, field, i, after, more, first, last)
  local r = call('HMGET', task, 'claim', 'end', 'cancel', field, 'n', 'prompt', 'followers')
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
    if discarded ~= '0' then -- also of a search that was cut: it has no entries, and may be cancelled
      call('HSET', task, 'discarded', discarded)
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
  call('HSET', task, field, after)
  if next == '0' then
    call('HSETNX', task, 'first', now)
  end
  if r[7] then
    publish_later(r[7], id, message)
  else
    call('PUBLISH', 'penstock:tokens:' .. id, message)
  end
  return 'ok', after
end

for s = 1, #KEYS / 2 do
  local count = tonumber(ARGV[a + 6])
  local fine, answer, next = pcall(append, KEYS[2 * s - 1], KEYS[2 * s], ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3],
    ARGV[a + 4], ARGV[a + 5], a + 7, a + 6 + count)
  if not fine then -- an error is a table, or text
    local denied = string.find(type(answer) == 'table' and answer.err or tostring(answer), 'ACL failure', 1, true)
    answer = denied and 'denied' or 'error'
  end
  out[2 * s - 1] = answer
  out[2 * s] = fine and next or 0
  a = a + 7 + count
end
for followers, lines in pairs(lines_of) do
  pcall(publish, followers, lines)
end
return out
