#!lua flags=allow-oom
-- FINISH(c, n) | No record: `gone`. final: `won` if claim = c, else `other`. Other claim: `other`. Cancel accepted:
-- `cancelled` is written, `won`. n != next, or the prompt's entries are missing: `resend`. Else status, terminal entry
-- and usage: `won`. The claim stays until SETTLE. A task in which Celery has no part is settled by the same call; if it
-- is settled already, the answer is `won`, whoever calls: its message is needed no more.
-- KEYS: task, stream
-- ARGV: id, claim, status, reasons (JSON array, one finish reason per choice), error (JSON object or null),
--       prompt tokens, cached tokens, scored (1: PROMPT came before), run (_run.lua), result (JSON, what a task that
--       generates nothing made; it is in the terminal entry if the task ends completed; or empty), default TTL
--       (seconds) of a task that is to be settled with it (or empty), then n per choice, from choice 0
-- Answers: {won, final status}; {gone}; {other}; {resend, next per choice ...}
-- include: _final.lua
-- include: _run.lua
-- include: _settle.lua
local task, stream = KEYS[1], KEYS[2]
local id, claim, ttl = ARGV[1], ARGV[2], ARGV[11]
local r = redis.call('HMGET', task, 'status', 'claim', 'cancel', 'prompt', 'settled')
local status = r[1]
if not status then
  return { 'gone' }
end
local function won(final)
  if ttl ~= '' and not r[5] then
    settle(task, stream, id, ttl)
  end
  return { 'won', final }
end
if ttl ~= '' and r[5] then
  return won(status)
end
if r[2] ~= claim then
  return { 'other' }
end
if FINAL[status] then
  return won(status)
end
local final = ARGV[3]
if r[3] then
  final = 'cancelled'
else
  local have, same = { 'resend' }, ARGV[8] == '0' or r[4]
  for k = 12, #ARGV do
    local next = tonumber(redis.call('HGET', task, 'next:' .. (k - 12)) or '0')
    have[#have + 1] = next
    same = same and next == tonumber(ARGV[k])
  end
  if not same then
    return have
  end
end
note_run(task, ARGV[9])
local result = final == 'completed' and ARGV[10] ~= '' and ARGV[10] or nil
finalise(task, stream, id, final, ARGV[4], ARGV[5], ARGV[6], ARGV[7], false, result)
return won(final)
