-- Included by ADMIT and CLAIM. The rules of `producers/store/fleet/routing.py`, which has them for clients.

-- The routing of a model (a table); nil where it has none.
local function routing_of(model)
  local now = redis.call('HGET', 'penstock:routing:' .. model, 'now')
  return now and cjson.decode(now)
end

-- The version that a target stands for: an alias, or a version.
local function version_at(routing, target)
  return target == 'default' and routing.default or routing.aliases[target] or target
end

-- The target that a plain Celery task goes to, by its id: as `Routing.target` has it. `fields`: of its record.
local function drawn(routing, id, fields)
  for _, rule in ipairs(routing.rules) do
    if rule.tenant and rule.tenant == fields.tenant or rule.tier and rule.tier == fields.tier then
      return rule.to
    end
  end
  if routing.ranges then
    local digits = tonumber(string.sub(redis.sha1hex(id .. '\0split'), 1, 13), 16)
    local point = (digits + 0.5) / 2 ^ 52 * 1e9
    for _, range in ipairs(routing.ranges) do
      if point < range[2] then
        return range[1]
      end
    end
  end
  return 'default'
end

-- Whether a version is archived: no new task may go there.
local function archived(routing, version)
  return routing.stages and routing.stages[version] == 'archived'
end

-- Whether new tasks may go to a version: the default, one that an alias names, or one that has a part of the split or
-- a rule.
local function routable(routing, version)
  if routing.default == version then
    return true
  end
  for _, at in pairs(routing.aliases) do
    if at == version then
      return true
    end
  end
  for target in pairs(routing.split) do
    if version_at(routing, target) == version then
      return true
    end
  end
  for _, rule in ipairs(routing.rules) do
    if version_at(routing, rule.to) == version then
      return true
    end
  end
  return false
end
