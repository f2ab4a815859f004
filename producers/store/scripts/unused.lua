#!lua flags=allow-oom
-- UNUSED(file) | no card of a model, or of a version, contains the file's hash: the file is removed; else nothing.
-- KEYS: models, versions, blob   ARGV: SHA-256 (hex)
-- Answers: 1 removed | 0
for at = 1, 2 do
  for _, card in ipairs(redis.call('HVALS', KEYS[at])) do
    if string.find(card, ARGV[1], 1, true) then
      return 0
    end
  end
end
return redis.call('UNLINK', KEYS[3])
