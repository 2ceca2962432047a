"""The scripts that Redis runs, each atomically. `local.py` says the same in Python.

Redis' own clock counts, so those of replicas don't matter. What a name means:

    …:requests_per_minute, …:tokens_per_minute   hash: bucket → count, see `counters.py`
    …:concurrent_requests                        sorted set: request id by the end of its lease
    …:spent                                      hash: `spent`, `held` (nanos), `checked` (ms), and
                                                 request id → nanos that it holds
    …:holds                                      sorted set: request id by the end of its lease
    …:request:<id>                               text: end of the lease, bucket of admission, tokens
                                                 granted in all, then bucket:tokens of each grant

ARGV is one MessagePack array, as each argument of its own costs the client more to write than the
script to run; below, ARGV 1 is the first in it. Numbers become text by `%.0f`, as Lua's own way
loses digits of large ones.
"""

from msgspec import Struct

from gateway.tenants.limits import counters

SERVER_CLOCK = "redis.call('TIME')"
"""Seconds and microseconds."""

_COMMON = f"""
local BUCKET, BUCKETS = {counters.BUCKET_MS}, {counters.BUCKETS}
local WINDOW_TTL = BUCKET * (BUCKETS + 1)
local DAY = 86400000
local ARGV = cmsgpack.unpack(ARGV[1])
local time = <clock>
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bucket = math.floor(now / BUCKET)

-- `+ 0` makes a zero of -0, which Redis takes for no integer
local function text(number) return string.format('%.0f', number + 0) end

-- what counts in a window, and its buckets as {{bucket, count}}, oldest first
local function filled(window)
  local fields, sum, buckets = redis.call('HGETALL', window), 0, {{}}
  for i = 1, #fields, 2 do
    local b, n = tonumber(fields[i]), tonumber(fields[i + 1])
    if b > bucket - BUCKETS then
      sum = sum + n
      buckets[#buckets + 1] = {{b, n}}
    else
      redis.call('HDEL', window, fields[i])
    end
  end
  table.sort(buckets, function(x, y) return x[1] < y[1] end)
  return sum, buckets
end

local function leaves_ms(b) return (b + BUCKETS) * BUCKET - now end

-- when enough buckets will have left for `excess` to be gone
local function wait_ms(buckets, excess)
  for _, pair in ipairs(buckets) do
    excess = excess - pair[2]
    if excess <= 0 then return leaves_ms(pair[1]) end
  end
  return BUCKET * BUCKETS
end

local function count(window, n)
  redis.call('HINCRBY', window, text(bucket), n)
  redis.call('PEXPIRE', window, WINDOW_TTL)
end

local function release(counter, holds, id)
  local nanos = redis.call('HGET', counter, id)
  if nanos then
    redis.call('HINCRBY', counter, 'held', text(-nanos))
    redis.call('HDEL', counter, id)
  end
  redis.call('ZREM', holds, id)
end

-- spent and held of a budget, without the holds that lapsed; nil where nothing is known
local function budget(counter, holds)
  local spent = redis.call('HGET', counter, 'spent')
  if not spent then return nil, 0 end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', holds, '-inf', now)) do
    release(counter, holds, id)
  end
  return tonumber(spent), tonumber(redis.call('HGET', counter, 'held') or 0)
end

local function hold(counter, holds, id, nanos, lease, ends)
  redis.call('HINCRBY', counter, 'held', text(nanos))
  redis.call('HINCRBY', counter, id, text(nanos))
  redis.call('ZADD', holds, now + lease, id)
  redis.call('PEXPIREAT', counter, text(ends + DAY))
  redis.call('PEXPIREAT', holds, text(ends + DAY))
end

-- bucket of admission, tokens granted, and the grants; nil where there is none or it has lapsed
local function read(record)
  local kept = redis.call('GET', record)
  if not kept then return nil end
  local ends, admitted, total, rest = string.match(kept, '^(%d+) (%d+) (%d+)(.*)$')
  if tonumber(ends) <= now then return nil end
  local grants = {{}}
  for b, n in string.gmatch(rest, '(%d+):(%d+)') do
    if tonumber(b) > bucket - BUCKETS then grants[#grants + 1] = {{tonumber(b), tonumber(n)}} end
  end
  return tonumber(admitted), tonumber(total), grants
end

local function write(record, lease, admitted, total, grants)
  local kept = text(now + lease) .. ' ' .. text(admitted) .. ' ' .. text(total)
  for _, pair in ipairs(grants) do kept = kept .. ' ' .. text(pair[1]) .. ':' .. text(pair[2]) end
  redis.call('SET', record, kept, 'PX', lease)
end
"""

# KEYS  1 the request's record
#       then the windows of requests, the windows of tokens, the leases of running requests,
#       and of each budget `spent` and `holds`
# ARGV  1 request id   2 lease, ms   3 to 6 how many windows of requests, of tokens, leases, budgets
#       7 tokens   8 nanos to hold
#       then the limit of each window and of each set of leases, and of each budget its amount and
#       the end of its period, ms
# Returns {answer, which, wait ms, stale, then of each window: used, reset ms}; see `Verdict`.
_ADMIT = f"""
local id, lease = ARGV[1], ARGV[2]
local requests, windows = ARGV[3], ARGV[3] + ARGV[4]
local leases, budgets = ARGV[5], ARGV[6]
local tokens, nanos = ARGV[7], ARGV[8]
local repeated = read(KEYS[1]) ~= nil
local answer, which, wait, stale, sums, resets = 0, 0, 0, -1, {{}}, {{}}

for i = 1, windows do
  local amount, limit = i <= requests and 1 or tokens, ARGV[8 + i]
  local sum, buckets = filled(KEYS[1 + i])
  sums[i], resets[i] = sum, #buckets > 0 and leaves_ms(buckets[#buckets][1]) or 0
  if sum + amount > limit then
    local ms = wait_ms(buckets, sum + amount - limit)
    if ms > wait then answer, which, wait = {counters.Answer.WINDOW_FULL}, i - 1, ms end
  end
end
for i = 1, leases do
  local set = KEYS[1 + windows + i]
  redis.call('ZREMRANGEBYSCORE', set, '-inf', now)
  if answer == 0 and redis.call('ZCARD', set) >= ARGV[8 + windows + i] then
    answer, which, wait = {counters.Answer.NO_PLACE}, i - 1, {counters.SLOT_WAIT_MS}
  end
end
for i = 1, budgets do
  local counter, holds = KEYS[2 * i + windows + leases], KEYS[2 * i + 1 + windows + leases]
  local amount = ARGV[2 * i + 7 + windows + leases]
  local spent, held = budget(counter, holds)
  if not spent then
    if answer ~= {counters.Answer.UNKNOWN} then
      answer, which, wait = {counters.Answer.UNKNOWN}, i - 1, 0
    end
  elseif answer ~= {counters.Answer.UNKNOWN} and answer ~= {counters.Answer.SPENT} then
    if spent >= amount or spent + nanos > amount then
      answer, which, wait = {counters.Answer.SPENT}, i - 1, 0
    elseif answer == 0 and spent + held + nanos > amount then
      answer, which, wait = {counters.Answer.HELD}, i - 1, {counters.HOLD_WAIT_MS}
    end
  end
  if spent and now - redis.call('HGET', counter, 'checked') >= {counters.RECHECK_MS} then
    redis.call('HSET', counter, 'checked', text(now))
    stale = i - 1
  end
end

if repeated then
  answer, which, wait = 0, 0, 0
elseif answer == 0 then
  for i = 1, windows do
    local amount = i <= requests and 1 or tokens
    count(KEYS[1 + i], amount)
    sums[i] = sums[i] + amount
    resets[i] = math.max(resets[i], leaves_ms(bucket))
  end
  for i = 1, leases do
    redis.call('ZADD', KEYS[1 + windows + i], now + lease, id)
    redis.call('PEXPIRE', KEYS[1 + windows + i], lease)
  end
  for i = 1, budgets do
    hold(KEYS[2 * i + windows + leases], KEYS[2 * i + 1 + windows + leases], id, nanos, lease,
         ARGV[2 * i + 8 + windows + leases])
  end
  write(KEYS[1], lease, bucket, tokens, {{{{bucket, tokens}}}})
end
local told = {{answer, which, wait, stale}}
for i = 1, windows do
  told[#told + 1] = sums[i]
  told[#told + 1] = resets[i]
end
return told
"""

# KEYS  1 the record; then the windows of tokens, the leases, and of each budget `spent`, `holds`
# ARGV  1 request id   2 lease, ms   3 to 5 how many windows of tokens, leases, budgets
#       6 tokens granted before   7 tokens wanted   8 micros that a million of them cost
#       then the limit of each window, and of each budget its amount and the end of its period
# Returns the tokens granted now; -1 - index of a budget of which nothing is known.
_EXTEND = """
local id, lease = ARGV[1], ARGV[2]
local windows, leases, budgets = ARGV[3], ARGV[4], ARGV[5]
local before, granted, micros = ARGV[6], ARGV[7], ARGV[8]
local admitted, total, grants = read(KEYS[1])
if admitted and total > before then return total - before end

for i = 1, windows do
  granted = math.min(granted, ARGV[8 + i] - filled(KEYS[1 + i]))
end
for i = 1, budgets do
  local spent, held = budget(KEYS[2 * i + windows + leases], KEYS[2 * i + 1 + windows + leases])
  if not spent then return -i end
  if micros > 0 then
    local left = ARGV[2 * i + 7 + windows] - spent - held
    granted = math.min(granted, math.floor(left * 1000 / micros))
  end
end
if granted < 1 then return 0 end

for i = 1, windows do count(KEYS[1 + i], granted) end
for i = 1, budgets do
  hold(KEYS[2 * i + windows + leases], KEYS[2 * i + 1 + windows + leases], id,
       math.ceil(granted * micros / 1000), lease, ARGV[2 * i + 8 + windows])
end
if not admitted then
  admitted, total, grants = 0, before, {}
  for i = 1, leases do
    redis.call('ZADD', KEYS[1 + windows + i], now + lease, id)
    redis.call('PEXPIRE', KEYS[1 + windows + i], lease)
  end
end
local last = grants[#grants]
if last and last[1] == bucket then
  last[2] = last[2] + granted
else
  grants[#grants + 1] = {bucket, granted}
end
write(KEYS[1], lease, admitted, total + granted, grants)
return granted
"""

# KEYS  1 the record; then all sorted sets in which the request has a lease
# ARGV  1 request id   2 lease, ms
_BEAT = """
local lease = ARGV[2]
local admitted, total, grants = read(KEYS[1])
if not admitted then return 0 end
write(KEYS[1], lease, admitted, total, grants)
for i = 2, #KEYS do
  redis.call('ZADD', KEYS[i], 'XX', now + lease, ARGV[1])
  if redis.call('PTTL', KEYS[i]) < lease then redis.call('PEXPIRE', KEYS[i], lease) end
end
return 1
"""

# KEYS  as of the script that admits
# ARGV  1 request id   2 to 5 how many windows of requests, of tokens, leases, budgets
#       6 tokens used   7 whether the request was refused   8 nanos that it cost
_SETTLE = """
local id = ARGV[1]
local requests, windows = ARGV[2], ARGV[2] + ARGV[3]
local leases, budgets = ARGV[4], ARGV[5]
local admitted, total, grants = read(KEYS[1])

for i = 1, leases do redis.call('ZREM', KEYS[1 + windows + i], id) end
for i = 1, budgets do
  local counter, holds = KEYS[2 * i + windows + leases], KEYS[2 * i + 1 + windows + leases]
  release(counter, holds, id)
  if admitted and redis.call('HEXISTS', counter, 'spent') == 1 then
    redis.call('HINCRBY', counter, 'spent', text(ARGV[8]))
  end
end
if not admitted then return 0 end

local function give(window, b, n)
  if redis.call('HEXISTS', window, text(b)) == 1 then
    redis.call('HINCRBY', window, text(b), text(-n))
  end
end
if ARGV[7] then
  for i = 1, requests do give(KEYS[1 + i], admitted, 1) end
end
local unused = total - ARGV[6]
for g = #grants, 1, -1 do
  local n = math.min(grants[g][2], unused)
  if n > 0 then
    for i = requests + 1, windows do give(KEYS[1 + i], grants[g][1], n) end
    unused = unused - n
  end
end
if unused < 0 then
  for i = requests + 1, windows do count(KEYS[1 + i], -unused) end
end
redis.call('DEL', KEYS[1])
return 1
"""

# KEYS  1 `spent` of a budget
# ARGV  1 nanos   2 the end of its period, ms
_RAISE = """
local spent = tonumber(redis.call('HGET', KEYS[1], 'spent') or 0)
redis.call('HSET', KEYS[1], 'spent', text(math.max(spent, ARGV[1])), 'checked', text(now))
redis.call('PEXPIREAT', KEYS[1], text(ARGV[2] + DAY))
return 1
"""


class Scripts(Struct, frozen=True):
    admit: str
    extend: str
    beat: str
    settle: str
    raise_spent: str


def scripts(clock: str = SERVER_CLOCK) -> Scripts:
    """`clock`: a Lua expression for what TIME returns."""
    common = _COMMON.replace("<clock>", clock)
    return Scripts(*(common + body for body in (_ADMIT, _EXTEND, _BEAT, _SETTLE, _RAISE)))
