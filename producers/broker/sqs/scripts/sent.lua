#!lua
-- SENT | messages of one list are about to be sent to SQS: they are entered into its index. Repeating it changes
-- nothing.
-- ARGV: list, then for each message its member, ms at which its task was submitted (0: not known)
-- Answers: how many were not there
-- include: _index.lua
local now, new = now_ms(), 0
for k = 2, #ARGV, 2 do
  local at = tonumber(ARGV[k + 1])
  if enter(ARGV[1], ARGV[k], at > 0 and math.min(at, now) or now) then
    new = new + 1
  end
end
return new
