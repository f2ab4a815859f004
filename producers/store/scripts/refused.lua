#!lua
-- REFUSED | a request was refused after a gateway had worked for it: it counts in `requests` of this minute, in each of
-- these accounts, and in nothing else. Each call counts one; so it is not repeated.
-- KEYS: accounts   ARGV: their limits (JSON, a list)
-- Answers: as `charge` does (_limits.lua), which begins with {refused, the first account whose requests are used up now
--          (from 0; -1: none)}
-- include: producers.connection/_now.lua
-- include: _limits.lua
return charge_refused(KEYS, cjson.decode(ARGV[1]), now_ms())
