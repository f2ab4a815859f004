-- Which of these incarnations have a listener to their alive channel on this server. None where the user may not ask:
-- then no lease says `listens`, and no look counts.
local function hear(incs)
  local channels, heard = {}, {}
  for k, inc in ipairs(incs) do
    channels[k] = 'penstock:alive:' .. inc
  end
  local said = redis.pcall('PUBSUB', 'NUMSUB', unpack(channels))
  for k, inc in ipairs(incs) do
    heard[inc] = not said.err and tonumber(said[2 * k]) > 0
  end
  return heard
end

-- How often a worker joined those that this server hears (see JOIN).
local function joins()
  return redis.call('GET', 'penstock:joins') or '0'
end

-- The lease's value with what this server hears of its worker, and when, in joins; `about` is a JSON object.
local function lease_of(inc, about)
  if not hear({ inc })[inc] then
    return about
  end
  return (about:gsub('}%s*$', ',"listens":true,"joins":' .. joins() .. '}'))
end

-- Whether a lease's value says that its worker was heard, and was written since that join. A release that counts no
-- joins says none: 0.
local function listens(about, since)
  local fine, said = pcall(cjson.decode, about)
  return fine and type(said) == 'table' and said.listens == true and (tonumber(said.joins) or 0) >= tonumber(since)
end

-- Whether an incarnation is dead as far as `me`, who is heard here in the same call, can tell: its lease stands and
-- says, since that join, that it listens, and nobody does.
local function silent(inc, me, since)
  local heard = hear({ me, inc })
  local about = heard[me] and not heard[inc] and redis.call('GET', 'penstock:lease:' .. inc)
  return about and listens(about, since)
end

-- Notes that an incarnation was ended by another, for the worker if it lives after all; for an hour.
local function note_taken(inc, task)
  local taken = 'penstock:taken:' .. inc
  redis.call('HINCRBY', taken, task, 1)
  redis.call('PEXPIRE', taken, 3600000)
end
