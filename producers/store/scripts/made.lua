#!lua flags=allow-oom
-- MADE | the key's entry stands: what it names was made, so that a repeated request never makes it again, also once it
-- is gone. Else nothing.
-- KEYS: entry
-- Answers: 1 | 0
-- include: _made.lua
return made(KEYS[1])
