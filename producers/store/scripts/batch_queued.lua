#!lua flags=allow-oom
-- BATCH_QUEUED | QUEUED for each of these tasks.
-- KEYS: submitting   ARGV: id, ...
-- Answers: the number of tasks that are `queued` then
-- include: _queued.lua
local count = 0
for _, id in ipairs(ARGV) do
  if queued('penstock:task:' .. id, KEYS[1], id) == 'queued' then
    count = count + 1
  end
end
return count
