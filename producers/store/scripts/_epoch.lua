-- Shared by LEASE and LEAD. Whether the store has another epoch than the caller, or is being restored. It may have been
-- restored from a backup since the caller began (`producers/store/epoch.py`).
local function other_epoch(own)
  local now = redis.call('HMGET', 'penstock:epoch', 'id', 'state')
  return (now[1] or '') ~= own or now[2] == 'restoring'
end
