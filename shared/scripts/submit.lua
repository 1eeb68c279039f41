-- Registers a request and reserves its place in the queue, if there is room.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] sorted set  tokenmill:waiting:<model>
-- ARGV: id, queue limit, ms until the deadline, ms the log outlives it, model, priority, then what
--       the front end wants to find again beside the request: name, value, ...
-- Returns {'ok', deadline in ms} | {'full', requests waiting} | {'exists', 0}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'exists', 0}
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local depth = redis.call('ZCARD', KEYS[2])
if depth >= tonumber(ARGV[2]) then
  return {'full', depth}
end
local deadline = now + tonumber(ARGV[3])
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[3]) then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', 0, 'deadline', deadline,
  'model', ARGV[5], 'priority', ARGV[6], 'log_ttl', ARGV[4])
for i = 7, #ARGV, 2 do
  redis.call('HSET', KEYS[1], 'attribute:' .. ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[3]) + tonumber(ARGV[4]))
return {'ok', deadline}
