#!lua flags=allow-oom
-- PRESSURE(queue) | how full a queue is, how fast its tasks are started, and the stage of overload that follows. All
-- gateways see the same stage: it is kept here, and left at less pressure than it was entered at.
-- A full store keeps no gateway from looking: what it writes is one hash for each queue.
-- The rate is an average over the last 20 s, of times in which tasks waited and a worker served the queue.
-- KEYS: what is known of the queue (a hash)
-- ARGV: queue, most tasks that may wait there, most in all, longest wait (s); each 0: any; the queues beside it ...
-- Answers: stage (0 to 3), pressure (per mille), tasks, their KV tokens, tokens a second (* 1000), served 0|1
local queue, USUAL_RATE, USUAL_S, RATE_S, APART_S = ARGV[1], 2500, 2, 20, 5
local ENTERED, LEFT = { 800, 900, 950 }, { 600, 700, 800 }

local function served()
  for _, pool in ipairs(redis.call('HKEYS', 'penstock:pools')) do
    if string.sub(pool, 1, #queue + 1) == queue .. '.' then
      for _, worker in ipairs(redis.call('SMEMBERS', 'penstock:workers:' .. pool)) do
        if redis.call('EXISTS', 'penstock:lease:' .. worker) == 1 then
          return true
        end
      end
    end
  end
  return false
end

local function sum(counts)
  local all = 0
  for _, count in ipairs(counts) do
    all = all + (count or 0)
  end
  return all
end

local tiers = { 'priority', 'default', 'flex', 'batch' }
local tasks, sizes = 0, { 0, 0, 0, 0 }
for _, its in ipairs({ queue, unpack(ARGV, 5) }) do
  local there = {}
  for k, tier in ipairs(tiers) do
    there[k] = tier .. ' ' .. its
  end
  tasks = tasks + sum(redis.call('HMGET', 'penstock:waiting', unpack(there)))
  for k, size in ipairs(redis.call('HMGET', 'penstock:waiting:tokens', unpack(there))) do
    sizes[k] = sizes[k] + (size or 0)
  end
end
local in_all = sum(redis.call('HMGET', 'penstock:waiting', unpack(tiers)))
local tokens = sum(sizes)
local r = redis.call('HMGET', KEYS[1], 'started', 'stage', 'taken', 'took', 'looked', 'seen')
local t = redis.call('TIME')
local now, started = t[1] + t[2] / 1e6, tonumber(r[1] or '0')
local stage, taken, took = tonumber(r[2] or '0'), tonumber(r[3]) or USUAL_RATE * USUAL_S, tonumber(r[4]) or USUAL_S
local serves = served()

local seen = tonumber(r[6] or '-1') -- what was started by the last look, if tasks waited and a worker served them
local apart = now - tonumber(r[5] or '0')
if serves and tasks > 0 and seen >= 0 and started >= seen and apart > 0 and apart <= APART_S then
  local kept = math.exp(-apart / RATE_S)
  taken, took = taken * kept + started - seen, took * kept + apart
end

-- Interactive tasks wait for each other; without a worker nobody knows for how long.
local rate = math.max(taken / took, 1e-3)
local wait = serves and (sizes[1] + sizes[2]) / rate or 0
local pressure = 0
for _, one in ipairs({ { tasks, ARGV[2] }, { in_all, ARGV[3] }, { wait, ARGV[4] } }) do
  local most = tonumber(one[2])
  if most > 0 then
    pressure = math.max(pressure, math.floor(1000 * one[1] / most))
  end
end
while stage < 3 and pressure >= ENTERED[stage + 1] do
  stage = stage + 1
end
while stage > 0 and pressure < LEFT[stage] do
  stage = stage - 1
end

local busy = serves and tasks > 0
redis.call('HSET', KEYS[1], 'stage', stage, 'taken', taken, 'took', took, 'looked', string.format('%.6f', now),
  'seen', busy and started or -1)
redis.call('EXPIRE', KEYS[1], 3600)
return { stage, pressure, tasks, tokens, math.floor(1000 * rate), serves and 1 or 0 }
