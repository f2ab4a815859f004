-- Shared by CLAIM, EXPIRE and UNSERVED; include it after _final.lua. It ends a task whose deadline passed while no live worker
-- had it: `incomplete` with the output so far if it was ever started, else `failed`. An ended choice keeps its finish
-- reason, which is on its last token; every other choice gets `deadline`.
-- err, why: another error, and another finish reason of open choices, than the deadline's (JSON).
local function late(task, stream, id, claims, err, why)
  why = why or '"deadline"'

  if not claims then
    finalise(task, stream, id, 'failed', '[]', err or EXPIRED, 0, 0)
    return 'failed'
  end
  local reasons, open = {}, 0
  for c = 0, math.min(tonumber(redis.call('HGET', task, 'n') or '1'), 64) - 1 do -- as _final.lua
    reasons[c + 1] = why
    open = open + (redis.call('HEXISTS', task, 'next:' .. c))
  end
  local seen, before = {}, '+'
  while open > 0 do
    local page = redis.call('XREVRANGE', stream, before, '-', 'COUNT', 500)
    for _, entry in ipairs(page) do
      local token = entry[2][2]
      local choice = string.match(token, '^%[(%d+),')
      if choice and not seen[choice] then
        seen[choice] = true
        open = open - 1
        local reason = cjson.decode(token)[6]
        reasons[choice + 1] = reason and '"' .. reason .. '"' or why
      end
    end
    if #page < 500 then
      break
    end
    before = '(' .. page[#page][1]
  end
  finalise(task, stream, id, 'incomplete', '[' .. table.concat(reasons, ',') .. ']', err or EXPIRED, prompt_used(task), 0)
  return 'incomplete'
end
