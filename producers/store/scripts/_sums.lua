-- Shared by FOLD and ROLL. It adds counts to the sum of a group in a bucket, an hour or a day. Each tenant has a hash of
-- its own in a bucket, so that who asks for one tenant's usage reads no other's. A sum is its counts in
-- the order of `producers.store.usage.ledger.COUNTS`, with spaces between; they are exact up to 2^53.
-- include: producers.connection/_now.lua
local function add(bucket, start, group, counts)
  local tenant = cjson.decode(group)[2]
  local key = 'penstock:usage:sums:' .. bucket .. ':' .. tenant
  local had, sum, k = redis.call('HGET', key, group), {}, 0
  for number in string.gmatch(had or '', '%d+') do
    k = k + 1
    sum[k] = tonumber(number)
  end
  for i, count in ipairs(counts) do
    sum[i] = string.format('%.0f', (sum[i] or 0) + count)
  end
  redis.call('HSET', key, group, table.concat(sum, ' '))
  redis.call('SADD', 'penstock:usage:tenants:' .. bucket, tenant)
  redis.call('ZADD', 'penstock:usage:sums', start, bucket)
end
