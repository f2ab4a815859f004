#!lua flags=allow-oom
-- OVERHEAD | what the counters of workers' idle time and of their cold starts, and of the energy of both, have grown by since the last call becomes
-- rows of the ledger, one for each model and state. The marks say how far, so that it counts once. A counter that fell
-- began again. The very first call sets the marks alone: nobody knows when what was counted before that was.
-- KEYS: marks (a hash), ledger, counters of a model (a hash) ...   ARGV: TTL (s) of the marks, model ...
-- Answers: the number of rows

-- What a counter has grown by since its mark, which is set to it.
local function grown(counters, counter, mark)
  local now = tonumber(redis.call('HGET', counters, counter) or '0') or 0
  local before = tonumber(redis.call('HGET', KEYS[1], mark) or '0')
  if now == before then
    return 0
  end
  redis.call('HSET', KEYS[1], mark, string.format('%.0f', now))
  return now >= before and now - before or now
end

local first, rows = redis.call('EXISTS', KEYS[1]) == 0, 0
redis.call('HSET', KEYS[1], 'begun', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
for k = 3, #KEYS do
  local model = ARGV[k - 1]
  for _, state in ipairs({ 'idle', 'starting' }) do
    local time = grown(KEYS[k], 'model_worker_us ' .. state .. ' n', state .. ' ' .. model)
    local energy = grown(KEYS[k], 'model_energy_uj ' .. state .. ' n', state .. ' J ' .. model)
    if not first and time + energy > 0 then
      redis.call('XADD', KEYS[2], '*', 'id', '', 'key', '', 'tenant', '', 'model', model, 'version', '', 'tier', state,
        'status', '', 'engine', string.format('%.0f', time), 'energy', string.format('%.0f', energy))
      rows = rows + 1
    end
  end
end
return rows
