#!lua flags=allow-oom
-- ENDPOINTS | the webhook endpoints of a tenant, or those without one.
-- KEYS: endpoints, ids of the tenant's
-- Answers: {JSON, ...}
-- include: _endpoints.lua
endpoints_indexed(redis.call('HLEN', KEYS[1]))
local found, values = endpoints_in({ KEYS[2] }), {}
for i = 2, #found, 2 do
  values[#values + 1] = found[i]
end
return values
