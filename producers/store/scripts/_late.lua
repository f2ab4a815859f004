-- Shared by CLAIM and EXPIRE; after _final.lua. A task whose deadline passed while nobody live had it: `incomplete` with
-- what it has where it was ever taken up, else `failed`. A choice that had ended keeps its finish reason, which stands on
-- its last token; any other's is `deadline`.
local function late(task, stream, id, claims)
  if not claims then
    finalise(task, stream, id, 'failed', '[]', EXPIRED, 0, 0)
    return 'failed'
  end
  local reasons, open = {}, 0
  for c = 0, tonumber(redis.call('HGET', task, 'n') or '1') - 1 do
    reasons[c + 1] = '"deadline"'
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
        reasons[choice + 1] = reason and '"' .. reason .. '"' or '"deadline"'
      end
    end
    if #page < 500 then
      break
    end
    before = '(' .. page[#page][1]
  end
  finalise(task, stream, id, 'incomplete', '[' .. table.concat(reasons, ',') .. ']', EXPIRED, prompt_used(task), 0)
  return 'incomplete'
end
