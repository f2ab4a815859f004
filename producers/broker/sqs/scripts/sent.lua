#!lua
-- SENT | enters messages of one list, which are about to be sent to SQS, into its index. Repeating it changes nothing.
-- ARGV: list, then for each message its member, ms at which its task was submitted (0: unknown)
-- Answers: how many are new
-- include: _index.lua
local now, new = now_ms(), 0
for k = 2, #ARGV, 2 do
  local at = tonumber(ARGV[k + 1])
  if enter(ARGV[1], ARGV[k], at > 0 and math.min(at, now) or now) then
    new = new + 1
  end
end
return new
