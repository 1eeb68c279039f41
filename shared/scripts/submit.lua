-- Registers a request and reserves its place in the queue, if there is room; or finds the request that
-- was registered earlier under the same idempotency key.
-- KEYS[1] hash        tokenmill:request:<id>
-- KEYS[2] sorted set  tokenmill:waiting:<model>
-- KEYS[3] hash        tokenmill:idempotency:<hash of key>, or no key
-- ARGV: id, a token of this call: the same call sent twice gets the same answer, queue limit, ms until
--       the deadline, ms the log outlives it, model, priority, digest of what is asked, prefix of the
--       requests' hashes, prefix of their logs, codes of the failures after which a request runs anew,
--       between commas, then what the front end wants to find again beside the request: name, value, ...
-- Returns {'ok', deadline in ms} | {'full', requests waiting} | {'exists', 0} | {'reused', 0}: the key
--   stands for something else | {'joined', id, state}: the key stands for this request
local earlier = redis.call('HMGET', KEYS[1], 'token', 'deadline')
if earlier[1] == ARGV[2] then
  return {'ok', tonumber(earlier[2])}
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'exists', 0}
end

-- Whether the log of a request that has ended says that it may be given again.
local function is_final(log_key)
  local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
  if not last then
    return false
  end
  local readable, event = pcall(cjson.decode, last[2][2])
  if not readable or type(event) ~= 'table' then
    return false
  end
  if event.type == 'failed' then
    return not string.find(ARGV[11], ',' .. tostring(event.code) .. ',', 1, true)
  end
  return event.type == 'done'
end

if KEYS[3] then
  local reserved = redis.call('HMGET', KEYS[3], 'request', 'digest')
  local state = reserved[1] and redis.call('HGET', ARGV[9] .. reserved[1], 'state')
  if state then
    if reserved[2] ~= ARGV[8] then
      return {'reused', 0}
    end
    if state == 'queued' or state == 'running' or is_final(ARGV[10] .. reserved[1]) then
      return {'joined', reserved[1], state}
    end
  end
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local depth = redis.call('ZCARD', KEYS[2])
if depth >= tonumber(ARGV[3]) then
  return {'full', depth}
end
local deadline = now + tonumber(ARGV[4])
local ttl = tonumber(ARGV[4]) + tonumber(ARGV[5])
redis.call('ZADD', KEYS[2], deadline, ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', 0, 'deadline', deadline,
  'model', ARGV[6], 'priority', ARGV[7], 'log_ttl', ARGV[5], 'token', ARGV[2],
  'submitted_at', now, 'queued_at', now)
for i = 12, #ARGV, 2 do
  redis.call('HSET', KEYS[1], 'attribute:' .. ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ttl)
if KEYS[3] then
  redis.call('HSET', KEYS[3], 'request', ARGV[1], 'digest', ARGV[8])
  redis.call('PEXPIRE', KEYS[3], ttl)
end
return {'ok', deadline}
