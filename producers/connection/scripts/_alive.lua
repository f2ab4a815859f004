-- Whether a connection listens to an incarnation's alive channel on this server. False as well where the user may not
-- ask: then nobody is heard, so that no lease says `listens` and no look counts.
local function heard(inc)
  local said = redis.pcall('PUBSUB', 'NUMSUB', 'penstock:alive:' .. inc)
  return not said.err and tonumber(said[2]) > 0
end

-- The lease's value with what this server hears of its worker; `about` is a JSON object.
local function lease_of(inc, about)
  return heard(inc) and about:gsub('}%s*$', ',"listens":true}') or about
end

-- Whether an incarnation is dead as far as `me`, who is heard here in the same call, can tell: its lease stands and says
-- that it listens, and nobody does.
local function silent(inc, me)
  local about = heard(me) and not heard(inc) and redis.call('GET', 'penstock:lease:' .. inc)
  local fine, said = pcall(cjson.decode, about or '')
  return fine and type(said) == 'table' and said.listens == true
end

-- Notes that an incarnation was ended by another, for the worker if it lives after all; for an hour.
local function note_taken(inc, task)
  local taken = 'penstock:taken:' .. inc
  redis.call('HINCRBY', taken, task, 1)
  redis.call('PEXPIRE', taken, 3600000)
end
