-- Fences, appends to a request's log and publishes, in one step: nothing is published that is not
-- in the log, and nothing that a newer attempt has overtaken gets into either.
-- KEYS[1] hash    tokenmill:request:<id>
-- KEYS[2] stream  tokenmill:log:<id>
-- KEYS[3] set     tokenmill:running:<worker>
-- ARGV: id, channel, attempt, number of the first entry, state that this ends in ('' while it
--       runs), events...
-- Returns 1, also when these very entries were written before (a batch sent twice), or 0 when this
-- attempt no longer holds the request.
local request = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'log_ttl', 'seq')
local seq = tonumber(ARGV[4])
if request[2] ~= ARGV[3] then
  return 0
end
if seq <= tonumber(request[4]) then
  return 1
end
if request[1] ~= 'running' then
  return 0
end
redis.call('HSET', KEYS[1], 'seq', seq + #ARGV - 6)
for i = 6, #ARGV do
  local id = ARGV[3] .. '-' .. (seq + i - 6)
  redis.call('XADD', KEYS[2], id, 'e', ARGV[i])
  redis.call('PUBLISH', ARGV[2], id .. ' ' .. ARGV[i])
end
if ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'state', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], request[3])
  redis.call('PEXPIRE', KEYS[2], request[3])
  redis.call('SREM', KEYS[3], ARGV[1])
elseif seq == 1 then
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
end
return 1
