#!lua flags=allow-oom
-- LEAD(me) | no leader, or `me` leads: `me` leads for `ms` from now; else nothing. Nor in another epoch than its own, or
-- while the store is being restored (`producers/store/epoch.py`). A caller that says no epoch is not asked for one: it
-- watches it (INBOX_HOLD).
-- KEYS: lease   ARGV: me, ms, the caller's epoch (or empty), where it says one
-- Answers: 0 (`me` leads) | the ms left of another leader's lease | -1 another epoch
-- include: _epoch.lua
if ARGV[3] and other_epoch(ARGV[3]) then
  return -1
end
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then
  return math.max(1, redis.call('PTTL', KEYS[1]))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
