#!lua flags=allow-oom
-- UNUSED(file) | no model's card contains the file's hash: the file is removed; else nothing.
-- KEYS: models, blob   ARGV: SHA-256 (hex)
-- Answers: 1 removed | 0
for _, card in ipairs(redis.call('HVALS', KEYS[1])) do
  if string.find(card, ARGV[1], 1, true) then
    return 0
  end
end
return redis.call('UNLINK', KEYS[2])
