#!lua
-- SENT | messages of one list are about to be sent to SQS: they are entered into its index. Repeating it changes nothing.
-- ARGV: list, member ...
-- Answers: how many were not there
-- include: _index.lua
local now, new = clock(), 0
for k = 2, #ARGV do
  if enter(ARGV[1], ARGV[k], now) then
    new = new + 1
  end
end
return new
