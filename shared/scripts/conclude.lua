-- Ends a request from outside its worker (cancelled, past its deadline, worker dead): opens the
-- next attempt, which fences whoever still runs it, and writes the terminal event as its only entry.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] stream      tokenmill:log:<id>
-- KEYS[3] sorted set  tokenmill:waiting:<model>, or any key when the model is not known
-- ARGV: id, channel, event, state that this ends in, only if run by this worker ('' for any),
--       prefix of the running sets
-- Returns {1, worker that ran it or ''} | {0, ''} when it had ended, is gone, or is another's.
local request = redis.call('HMGET', KEYS[1], 'state', 'worker', 'log_ttl')
local state = request[1]
if state ~= 'queued' and state ~= 'running' then
  return {0, ''}
end
local owner = state == 'running' and request[2] or ''
if ARGV[5] ~= '' and owner ~= ARGV[5] then
  return {0, ''}
end
local id = redis.call('HINCRBY', KEYS[1], 'attempt', 1) .. '-1'
redis.call('XADD', KEYS[2], id, 'e', ARGV[3])
redis.call('PUBLISH', ARGV[2], id .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[1], 'state', ARGV[4])
redis.call('PEXPIRE', KEYS[1], request[3])
redis.call('PEXPIRE', KEYS[2], request[3])
redis.call('ZREM', KEYS[3], ARGV[1])
if owner ~= '' then
  redis.call('SREM', ARGV[6] .. owner, ARGV[1])
end
return {1, owner}
