-- Included by _final.lua alone.

-- The engine's time for a task (microseconds), of all its starts that are noted: the last number of each (_run.lua).
-- Then what the device drew for it (microjoules): the number before it, which is there if a meter told.
local function engine_time(task, starts)
  local time, energy = 0, 0
  for start = 1, math.min(tonumber(starts) or 0, 32) do
    local noted = redis.call('HGET', task, 'run:' .. start) or ''
    time = time + math.min(tonumber(string.match(noted, ',(%d+)%]$')) or 0, 1e15)
    energy = energy + math.min(tonumber(string.match(noted, ',(%d+),%d+%]$')) or 0, 1e15)
  end
  return string.format('%.0f', time), string.format('%.0f', energy)
end

-- Appends the row of a task that has just ended to the ledger (`producers/store/usage/ledger.py` has the format), in
-- the script that makes the record final: no end is without its row, and no row without its end. A field that the
-- record lacks is empty, so that all rows have the same fields, whose names a stream stores once. A plain Celery task
-- has no `created`: nobody knows when it was sent. `drawn`: of a task's chunks the first alone, for all of them had
-- one draw.
local function ledger_row(task, id, status, prompt, cached, output, longest)
  local r = redis.call('HMGET', task, 'key', 'tenant', 'model', 'version', 'tier', 'discarded', 'again', 'claims',
    'deaths', 'started', 'finished', 'created', 'plain', 'first', 'alias', 'generation', 'drawn', 'chunk')
  local time, energy = engine_time(task, r[8])
  redis.call('XADD', 'penstock:ledger', '*', 'id', id, 'key', r[1] or '', 'tenant', r[2] or '', 'model', r[3] or '',
    'version', r[4] or '', 'tier', r[5] or 'default', 'status', status, 'prompt', prompt, 'cached', cached,
    'output', output, 'discarded', r[6] or 0, 'again', r[7] or 0, 'attempts', r[8] or 0, 'deaths', r[9] or 0,
    'ms', r[10] and math.max(0, r[11] - r[10]) or 0, 'engine', time, 'energy', energy,
    'created', not r[13] and r[12] or '', 'started', r[10] or '', 'first', r[14] or '', 'longest', longest, 'alias', r[15] or '',
    'generation', r[16] or '', 'drawn', (r[18] or '0') == '0' and r[17] or '')
end
