-- Ends a request from outside its worker (cancelled, past its deadline, worker dead): opens the
-- next attempt, which fences whoever still runs it, and writes the terminal event as its only entry.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] stream      tokenmill:log:<id>
-- KEYS[3] sorted set  tokenmill:waiting:<model>, or any key when the model is not known
-- ARGV: id, channel, event, state that this ends in, only if run by this worker ('' for any),
--       prefix of the running sets
-- Returns {1, worker that ran it or ''} | {0, ''} when it had ended, is gone or unreadable, or is another's.
local function whole(text)
  return text and #text <= 15 and string.match(text, '^%d+$') and tonumber(text)
end

local request = redis.pcall('HMGET', KEYS[1], 'state', 'worker', 'log_ttl', 'attempt')
local state, log_ttl = request[1], whole(request[3])
if (state ~= 'queued' and state ~= 'running') or not log_ttl or not whole(request[4]) then
  return {0, ''}
end
local owner = state == 'running' and request[2] or ''
if ARGV[5] ~= '' and owner ~= ARGV[5] then
  return {0, ''}
end
local id = redis.call('HINCRBY', KEYS[1], 'attempt', 1) .. '-1'
-- What has been put in the place of the log is left there: whoever reads it finds no log.
redis.pcall('XADD', KEYS[2], id, 'e', ARGV[3])
redis.call('PUBLISH', ARGV[2], id .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[1], 'state', ARGV[4])
redis.call('PEXPIRE', KEYS[1], log_ttl)
redis.call('PEXPIRE', KEYS[2], log_ttl)
redis.call('ZREM', KEYS[3], ARGV[1])
if owner ~= '' then
  redis.call('SREM', ARGV[6] .. owner, ARGV[1])
end
return {1, owner}
