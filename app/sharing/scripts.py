"""What the shared meter does on the server, in Lua: each script is one step that nothing comes between.

A pool (one account's budget in one period) is a hash: `s` micro-dollars settled, `h` held, `d` there while its figures
are doubted, and `id:<hold>` = `<micro-dollars>:<ms when it was held>` for each open hold. While somebody compares it
with the ledger, `c` is when that began, and `done:<hold>`, of the same form, is what has been settled since.

A flow's part is the time in ms at which its bucket will be empty. `settled:<hold>` is what a hold came to, kept for a
minute, in case the ledger is read before it has heard of it. `due` are the pools that must be compared with the
ledger, by the time in ms when.

Every script takes the time in ms as its first argument; 0 = the server's own clock.
"""

from __future__ import annotations

from app.sharing.link import Script

_NOW = """
local now = tonumber(ARGV[1])
if now == 0 then
  local t = redis.call('TIME')
  now = t[1] * 1000 + t[2] / 1000
end
local function whole(n) return string.format('%.0f', n) end
local function amount_of(value) return value and tonumber(string.match(value, '^-?%d+')) or 0 end
-- 0 - n and not -n: the server takes no -0.
local function release(pool, id)
  local value = redis.call('HGET', pool, 'id:' .. id)
  if value then
    redis.call('HDEL', pool, 'id:' .. id)
    redis.call('HINCRBY', pool, 'h', whole(0 - amount_of(value)))
  end
  return value
end
local function doubt(pool, due, at)
  redis.call('HSET', pool, 'd', 1)
  redis.call('ZADD', due, whole(at), pool)
end
"""

# KEYS: due, settled:<id>, the pools, the flows' parts.
# ARGV: now, id, amount, number of pools, ms until an open hold is looked after, then for each pool: limit; then for
# each part: amount, limit.
# Returns {'granted'}, {'settled'} for a hold that its owner has given up, {'unknown', index of a pool...}, {'budget',
# index, 1 if only holds fill it} or {'rate', index of a part, ms to wait}. Indexes begin at 0.
RESERVE = Script(
    _NOW
    + """
local id, amount, pools = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', KEYS[2]) == 1 then return {'settled'} end
local unknown = {'unknown'}
for i = 1, pools do
  if redis.call('EXISTS', KEYS[2 + i]) == 0 then unknown[#unknown + 1] = i - 1 end
end
if #unknown > 1 then return unknown end

local function refused(answer)
  for i = 1, pools do release(KEYS[2 + i], id) end
  return answer
end
for i = 1, pools do
  local limit = tonumber(ARGV[5 + i])
  local v = redis.call('HMGET', KEYS[2 + i], 's', 'h', 'id:' .. id)
  local settled = tonumber(v[1])
  if settled + tonumber(v[2]) - amount_of(v[3]) >= limit then
    return refused({'budget', i - 1, settled < limit and 1 or 0})
  end
end
local empty_at = {}
for i = 1, #KEYS - 2 - pools do
  local key = KEYS[2 + pools + i]
  local wanted, limit = tonumber(ARGV[4 + pools + 2 * i]), tonumber(ARGV[5 + pools + 2 * i])
  if limit <= 0 then return refused({'rate', i - 1, '60000'}) end
  local begin = math.max(tonumber(redis.call('GET', key) or 0), now)
  local wait = begin + math.min(wanted, limit) * 60000 / limit - now - 60000
  if wait > 0.01 then return refused({'rate', i - 1, string.format('%.3f', wait)}) end
  empty_at[i] = begin + wanted * 60000 / limit
end

for i = 1, pools do
  local pool = KEYS[2 + i]
  release(pool, id)
  redis.call('HSET', pool, 'id:' .. id, whole(amount) .. ':' .. whole(now))
  redis.call('HINCRBY', pool, 'h', whole(amount))
  redis.call('ZADD', KEYS[1], 'NX', whole(now + tonumber(ARGV[5])), pool)
end
for i, at in ipairs(empty_at) do
  redis.call('SET', KEYS[2 + pools + i], string.format('%.6f', at), 'PX', whole(math.ceil(at - now) + 60000))
end
return {'granted'}
"""
)

# KEYS: due, settled:<id>, the pools, the flows' token parts.
# ARGV: now, id, cost, number of pools, ms that `settled:<id>` is kept, then for each part: difference of tokens, limit.
# Returns for each pool what was settled before and after, or -1 twice where the hold was not open.
SETTLE = Script(
    _NOW
    + """
local id, cost, pools = ARGV[2], ARGV[3], tonumber(ARGV[4])
local first = redis.call('SET', KEYS[2], cost, 'NX', 'PX', ARGV[5])
local sums = {}
for i = 1, pools do
  local pool = KEYS[2 + i]
  local before, after = -1, -1
  local value = release(pool, id)
  if value then
    after = redis.call('HINCRBY', pool, 's', cost)
    before = after - tonumber(cost)
    if redis.call('HEXISTS', pool, 'c') == 1 then
      redis.call('HSET', pool, 'done:' .. id, cost .. ':' .. string.match(value, '%d+$'))
    end
  elseif first and redis.call('EXISTS', pool) == 1 then
    -- Either what the ledger says held it already, or nothing does: only the ledger can tell.
    doubt(pool, KEYS[1], now)
  end
  sums[2 * i - 1], sums[2 * i] = before, after
end
if first then
  for i = 1, #KEYS - 2 - pools do
    local key = KEYS[2 + pools + i]
    local difference, limit = tonumber(ARGV[4 + 2 * i]), tonumber(ARGV[5 + 2 * i])
    local at = tonumber(redis.call('GET', key) or 0)
    if difference > 0 or at > 0 then
      if difference > 0 then at = math.max(at, now) end
      at = at + difference * 60000 / limit
      redis.call('SET', key, string.format('%.6f', at), 'PX', whole(math.max(0, math.ceil(at - now)) + 60000))
    end
  end
end
return sums
"""
)

# Makes a pool from what the ledger says, or sets one right: the ledger's sum and open holds, and of the pool only what
# the ledger did not know yet when it was asked.
# KEYS: due, the pool, settled:<id> for each of the ledger's open holds.
# ARGV: now, when the comparison began as TAKE_DUE said it, or '' for an unknown pool that is to be made; what is
# settled, when the pool may be forgotten, how old in ms a hold must be for the ledger to know it, ms until a doubted
# pool is compared again, ms until one with open holds is, then for each open hold: id, amount.
# Returns 1 if it did something: not where the pool was made, lost or taken by another process in the meantime.
SET = Script(
    _NOW
    + """
local due, pool, began = KEYS[1], KEYS[2], ARGV[2]
local making = began == ''
if making then
  if redis.call('EXISTS', pool) == 1 then return 0 end
elseif redis.call('HGET', pool, 'c') ~= began then
  return 0
end
local settled, held, doubted = tonumber(ARGV[3]), 0, making
local open, order = {}, {}
for i = 1, #KEYS - 2 do
  local id, cost = ARGV[6 + 2 * i], redis.call('GET', KEYS[2 + i])
  if cost then
    settled = settled + tonumber(cost)
    open[id] = 'settled'
  else
    open[id] = ARGV[7 + 2 * i]
    order[#order + 1] = id
  end
end

local known = making and 0 or tonumber(began) - tonumber(ARGV[5])
local fields = redis.call('HGETALL', pool)
for i = 1, #fields, 2 do
  local kind, id = string.match(fields[i], '^(%a+):(.*)$')
  if kind then
    local amount, at = string.match(fields[i + 1], '^(-?%d+):(%d+)$')
    local young = tonumber(at) > known
    if kind == 'done' then
      if not open[id] and young then
        settled, doubted = settled + tonumber(amount), true
      end
      redis.call('HDEL', pool, fields[i])
    elseif open[id] and open[id] ~= 'settled' then
      open[id] = nil
      held = held + tonumber(amount)
    elseif young then
      held, doubted = held + tonumber(amount), true
    else
      redis.call('HDEL', pool, fields[i])
    end
  end
end
for _, id in ipairs(order) do
  if open[id] then
    redis.call('HSET', pool, 'id:' .. id, open[id] .. ':' .. whole(now))
    held = held + tonumber(open[id])
  end
end

redis.call('HSET', pool, 's', whole(settled), 'h', whole(held))
redis.call('HDEL', pool, 'c', 'd')
redis.call('PEXPIRE', pool, whole(math.max(60000, tonumber(ARGV[4]) - now)))
if doubted then
  doubt(pool, due, now + tonumber(ARGV[6]))
elseif held > 0 then
  redis.call('ZADD', due, whole(now + tonumber(ARGV[7])), pool)
else
  redis.call('ZREM', due, pool)
end
return 1
"""
)

# KEYS: due, pools.
# ARGV: now.
# Has these pools compared with the ledger at once.
DOUBT = Script(
    _NOW
    + """
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then doubt(KEYS[i], KEYS[1], now) end
end
return 1
"""
)

# KEYS: due.
# ARGV: now, how many, ms until another process may take the same pool.
# Returns the time now and the keys of pools that are due; they are its caller's to compare, for that long. The pools
# are in the same slot.
TAKE_DUE = Script(
    _NOW
    + """
local mine = {whole(now)}
for _, pool in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', whole(now), 'LIMIT', 0, tonumber(ARGV[2]))) do
  local v = redis.call('HMGET', pool, 'h', 'd')
  if v[2] or (v[1] and tonumber(v[1]) > 0) then
    redis.call('ZADD', KEYS[1], whole(now + tonumber(ARGV[3])), pool)
    redis.call('HSET', pool, 'c', whole(now))
    mine[#mine + 1] = pool
  else
    redis.call('ZREM', KEYS[1], pool)
  end
end
return mine
"""
)
