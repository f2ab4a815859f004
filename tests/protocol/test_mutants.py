"""The comparisons of `test_scripts` and `test_broker` bite: they notice each of these broken scripts."""

from __future__ import annotations

import pytest
from redis import Redis

from producers.broker.redis import calls as broker
from producers.contract import leases
from producers.store import protocol
from tests.exhaustive import few
from tests.protocol.server import Mutant, notices
from tests.protocol.test_broker import check_broker
from tests.protocol.test_scripts import check_store

pytestmark = pytest.mark.timeout(600)

#: Histories at most: a check ends with the first that shows the fault. Which are drawn depends on what was imported.
EXAMPLES = 1000
#: Which `make test` takes: they are noticed within the first histories.
SOON = (
    "ADMIT counts nothing that waits",
    "CLAIM asks for no lease",
    "FINISH asks for no claim",
    "CANCEL calls nobody back",
)
SOON_OF_BROKER = ("FETCH asks for no lease", "BACK marks no place", "REAP robs the living")
STORE = {
    "ADMIT counts nothing that waits": ("admit", "  wait_begins(task)\n", ""),
    "ADMIT calls every request its own": ("admit", "known[1] == nonce and 'mine' or 'exists'", "'mine'"),
    "ADMIT knows no window": ("admit", "now - asked > window", "false"),
    "QUEUED changes any status": ("queued", "status ~= 'submitting'", "status == ''"),
    "CLAIM counts what runs": ("claim", "wait_ends(task, true)", ""),
    "CLAIM asks for no lease": ("claim", "'penstock:lease:' .. inc) == 0", "'penstock:lease:' .. inc) == 2"),
    "CLAIM does not repeat itself": ("claim", "held == claim", "held == 0"),
    "CLAIM counts no deaths": ("claim", "deaths, stuck = deaths + 1, stuck + 1", ""),
    "CLAIM sees no progress": ("claim", "length > tonumber(r[10] or '0')", "false"),
    "CLAIM always sees progress": ("claim", "length > tonumber(r[10] or '0')", "length > 0"),
    "CLAIM has no end of patience": ("claim", "deaths >= 4 * limit", "false"),
    "CLAIM takes from the living": ("claim", "'penstock:lease:' .. owner) == 1", "'penstock:lease:' .. owner) == 2"),
    "CLAIM condemns what others lived to take": ("claim", "ARGV[6] == '1' and not r[8]", "ARGV[6] == '1'"),
    "CLAIM knows no versions": ("claim", "own[1] and own[1] ~= version", "false"),
    "CLAIM keeps what nobody has begun to a version": ("claim", "(begun or not own[4])", "true"),
    "CLAIM lets go what was sent to a version": ("claim", "(begun or not own[4])", "begun"),
    "CLAIM knows nothing of earlier releases": ("claim", "own[1] = pool and cjson.decode(pool).version", ""),
    "CLAIM knows no pools": ("claim", "own[3] ~= fingerprint", "false"),
    "CLAIM leaves to a pool what nobody has begun": ("claim", "begun and own[3] and", "own[3] and"),
    "CLAIM leaves to a pool without workers": ("claim", "if pool and lives({ pool }, need) then", "if pool then"),
    "CLAIM sends away what is cancelled": ("claim", "not r[5] and not is_late", "not is_late"),
    "CLAIM sends away what is late": ("claim", "not r[5] and not is_late", "not r[5]"),
    "CLAIM does not say that it was queued": ("claim", "redis.call('HSETNX', task, 'queued', now)", ""),
    "CLAIM says when it was queued anew": ("claim", "'HSETNX', task, 'queued', now", "'HSET', task, 'queued', now + 1"),
    "CLAIM leaves the task to the sweeper": ("claim", "redis.call('ZREM', 'penstock:submitting', id)\nif", "if"),
    "CLAIM knows of no revocation": ("claim", "redis.call('ZSCORE', 'penstock:revoked', id) or 0) > now", "0) > now"),
    "CLAIM obeys revocations for ever": (
        "claim",
        "'penstock:revoked', id) or 0) > now",
        "'penstock:revoked', id) or 0) > 0",
    ),
    "REVOKE takes from the living": (
        "revoke",
        "'penstock:lease:' .. r[2]) == 1 then\n  return 'owned'",
        "'penstock:lease:' .. r[2]) == 2 then\n  return 'owned'",
    ),
    "REVOKE forgets nothing": ("revoke", "redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)", ""),
    "APPEND writes after the end": ("append", "r[1] ~= claim or r[2]", "r[1] ~= claim"),
    "APPEND asks for no claim": ("append", "r[1] ~= claim or r[2]", "r[2]"),
    "APPEND publishes an overlap again": ("append", "first = first + tonumber(next) - tonumber(i)", ""),
    "ADMIT sees no memory": ("admit", "full = full or reserve(tier, fields, tokens, now)", ""),
    "ADMIT knows no tiers of memory": ("admit", "ADMITTED[kind] or ADMITTED.default", "0.99"),
    "APPEND sees no memory": ("append", "not may_write(task, now)", "false"),
    "APPEND knows no tiers of memory": (
        "append",
        "WRITTEN[redis.call('HGET', task, 'tier')] or WRITTEN.default",
        "WRITTEN.default",
    ),
    "APPEND takes each index for a position": ("append", "and not r[6] and next or", "and next or next or"),
    "APPEND leaves a gap": ("append", "> tonumber(next) or", "> tonumber(next) + 1 or"),
    "APPEND takes what is gone for another's": ("append", "'other' or 'gone'", "'other'"),
    "ADMIT counts no bytes": ("admit", "local bytes = kept_begins(kept, fields)", "local bytes = 1"),
    "SETTLE counts bytes for ever": ("settle", "    kept_ends(task, stream, now, ttl)\n", ""),
    "DELETE counts bytes that are gone": ("delete", "forget_rows(task)\nkept_gone(task)", "forget_rows(task)"),
    "DELETE counts no ids": ("delete", "kept_id(r[4], id, now_ms(), ttl)\n", ""),
    "FINISH bills nobody": ("finish", "  ledger_row(task, id, status, prompt, cached, out, longest)\n", ""),
    "FINISH measures all choices as one": ("finish", "math.max(longest, tokens)", "longest + tokens"),
    "FINISH measures no first token": ("finish", "'first', r[14] or ''", "'first', ''"),
    "FINISH knows when a plain task was sent": ("finish", "not r[13] and r[12] or ''", "r[12] or ''"),
    "FINISH asks for no claim": ("finish", "if r[2] ~= claim then", "if false then"),
    "FINISH takes what is gone for another's": ("finish", "return { 'gone' }", "return { 'other' }"),
    "FINISH compares no index": ("finish", "same and next == tonumber(ARGV[k])", "same"),
    "FINISH writes over a cancel": ("finish", "final = 'cancelled'", "final = ARGV[3]"),
    "FINISH settles nothing": ("finish", "    settle(task, stream, id, ttl)\n", ""),
    "FINISH of what it settled is another's": ("finish", "if ttl ~= '' and r[5] then", "if false then"),
    "CANCEL ends what is still submitting": ("cancel", "elseif status ~= 'submitting' then", "else"),
    "CANCEL leaves the dead owner's claim": ("cancel", "redis.call('HDEL', task, 'claim', 'owner')", ""),
    "CANCEL leaves what it only flags to a worker": (
        "cancel",
        "redis.call('ZADD', 'penstock:deadlines', now_ms(), id)",
        "",
    ),
    "EXPIRE looks at no clock": ("expire", "tonumber(r[3]) > now_ms()", "false"),
    "EXPIRE waits for the deadline of what is cancelled": ("expire", "or not r[4] and tonumber", "or tonumber"),
    "EXPIRE forgets cancels of what has no deadline": ("expire", "not (r[3] or r[4])", "not r[3]"),
    "EXPIRE ends what a live worker runs": ("expire", "if live or status", "if status"),
    "EXPIRE ends what is still submitting": ("expire", "live or status == 'submitting' or", "live or"),
    "EXPIRE writes over a cancel": ("expire", "if r[4] then\n  finalise", "if false then\n  finalise"),
    "EXPIRE fails what was taken up": ("expire", "late(task, stream, id, r[5])", "late(task, stream, id, false)"),
    "EXPIRE takes what waited for begun": ("expire", "late(task, stream, id, r[5])", "late(task, stream, id, '1')"),
    "what is late looks no further back than a page": ("expire", "#page < 500", "true"),
    "CLAIM fails what was taken up": ("claim", "late(task, stream, id, r[8])", "late(task, stream, id, false)"),
    "EXPIRE leaves the dead owner's claim": ("expire", "redis.call('HDEL', task, 'claim', 'owner')", ""),
    "ADMIT notes no deadline": ("admit", "redis.call('ZADD', deadlines, deadline, id)", ""),
    "CLAIM notes no deadline of a plain message": ("claim", "redis.call('ZADD', 'penstock:deadlines', r[6], id)", ""),
    "what has ended stays in the index of deadlines": ("finish", "redis.call('ZREM', 'penstock:deadlines', id)", ""),
    "ABSOLVE asks for no owner": ("absolve", "one.owner == ARGV[1]", "true"),
    "ABSOLVE counts the owner on": ("absolve", "table.remove(lost, k)", ""),
    "ABSOLVE takes back what progress took": ("absolve", "k > deaths - stuck", "true"),
    "RELEASE counts what is buried": ("release", "ARGV[3] ~= '1'", "true"),
    "RELEASE asks for no claim": ("release", "r[2] ~= ARGV[1]", "false"),
    "ADMIT counts what waits nowhere": ("admit", "add('penstock:waiting', kind .. ' ' .. queue, by)", ""),
    "CLAIM counts what it ends": ("claim", "  wait_ends(task)\n", ""),
    "CANCEL counts what it ends": ("cancel", "  wait_ends(task)\n", ""),
    "FINISH counts it less again": (
        "finish",
        "  if not r[1] then\n    return\n  end\n  redis.call('HDEL', task, 'waits')",
        "  r[1] = r[1] or 'default 0 '\n  redis.call('HDEL', task, 'waits')",
    ),
    "RELEASE counts nothing that waits": ("release", "    wait_begins(KEYS[1])\n", ""),
    "SETTLE keeps the stream for ever": ("settle", "redis.call('EXPIRE', stream, ttl + 60)", ""),
    "SETTLE takes what is gone for open": ("settle", "and -2 or -1", "and -2 or 0"),
    "SETTLE notes no dead letter": ("settle", "redis.call('HSET', KEYS[1], 'letter', ARGV[3])", ""),
    "CLAIM forgets the dead letter": ("claim", "'done', r[12] or nil", "'done'"),
    "SETTLE leaves the task to the sweeper": ("settle", "redis.call('ZREM', 'penstock:unsettled', id)", ""),
    "FINISH tells no sweeper": ("finish", "redis.call('ZADD', 'penstock:unsettled', now_ms(), id)", ""),
    "ORPHAN takes from the living": ("orphan", "'penstock:lease:' .. r[3]) == 1", "'penstock:lease:' .. r[3]) == 2"),
    "ORPHAN forgets a plain task's links": ("orphan", "if r[4] or (", "if ("),
    "ORPHAN forgets the dead letter": ("orphan", "err.code == 'dead_lettered'", "false"),
    "ORPHAN settles what runs": ("orphan", "not r[1] or not FINAL[r[1]] or r[2]", "not r[1] or r[2]"),
    "COMPACT leaves the stream": ("compact", "redis.call('UNLINK', stream)", ""),
    "COMPACT takes what is not settled": ("compact", "if not settled then", "if false then"),
    "COMPACT counts no entries": ("compact", " or length ~= tonumber(ARGV[3])", ""),
    "COMPACT keeps the result for ever": ("compact", "redis.call('PEXPIRE', result, left)", ""),
    "COMPACT comes back": (
        "compact",
        "redis.call('UNLINK', stream)\nredis.call('ZREM', KEYS[4], ARGV[1])",
        "redis.call('UNLINK', stream)",
    ),
    "DELETE leaves the stream": ("delete", "redis.call('UNLINK', task, stream)", "redis.call('UNLINK', task)"),
    "DELETE leaves what runs to its worker": (
        "delete",
        "redis.call('PUBLISH', 'penstock:control:'",
        "tostring('' .. ''",
    ),
    "DELETE tells no end": ("delete", "if not FINAL[r[1]] then", "if false then"),
    "DELETE leaves it to the sweeper": ("delete", "'unsettled', ", ""),
    "DELETE leaves its rows": ("delete", "forget_rows(task)\nkept_gone", "kept_gone"),
    "DELETE leaves rows that are due": ("delete", "'webhooks:due', ", ""),
    "DELETE calls back whom it leaves": ("delete", "prompt_used(task), 0, true)", "prompt_used(task), 0)"),
    "DELETE lists it": ("delete", "'readers', 'tasks', ", "'readers', "),
    "DELETE leaves the result": ("delete", "redis.pcall('UNLINK', 'celery-task-meta-' .. id)", ""),
    "DELETE does not repeat itself": ("delete", "== ARGV[2] and 'mine' or 'gone'", "and 'gone' or 'gone'"),
    "DELETE takes every call for its own": (
        "delete",
        "redis.call('GET', erased) == ARGV[2] and",
        "redis.call('GET', erased) and",
    ),
    "DELETE keeps no id": ("delete", "redis.call('SET', erased, ARGV[2], 'EX', ttl)", ""),
    "DELETE keeps the id for ever": ("delete", ", 'EX', ttl)", ")"),
    "DELETE leaves nothing to the sweeper": ("delete", "redis.call('ZADD', 'penstock:erasing', now_ms(), id)", ""),
    "ADMIT makes what was deleted": ("admit", "'penstock:erased:' .. id) == 1", "'penstock:erased:' .. id) == 2"),
    "CLAIM makes what was deleted": ("claim", "'penstock:erased:' .. id) == 1", "'penstock:erased:' .. id) == 2"),
    "SETTLE knows of no deletes": ("settle", "and -2 or -1", "and -1 or -1"),
    "FINISH calls nobody back": ("finish", "  outbox_task(task, id, status)\n", ""),
    "CANCEL calls nobody back": ("cancel", "  outbox_task(task, id, status)\n", ""),
    "CLAIM calls nobody back": ("claim", "  outbox_task(task, id, status)\n", ""),
    "EXPIRE calls nobody back": ("expire", "  outbox_task(task, id, status)\n", ""),
    "CLAIM tells of no start": ("claim", "if not r[8] then\n  outbox_task", "if false then\n  outbox_task"),
    "EXPIRE bills nobody": ("expire", "  ledger_row(task, id, status, prompt, cached, out, longest)\n", ""),
    "CLAIM bills nothing again": ("claim", "elseif length > 0 then", "elseif false then"),
    "a row of an earlier life is this one's": ("cancel", "':' .. created .. ':'", "':'"),
    "the end is published elsewhere": ("finish", "'[' .. at .. ',' .. entry", "'[' .. (at + 1) .. ',' .. entry"),
    "what CLAIM ends used no prompt": (
        "claim",
        "'failed', '[]', err, prompt_used(task), 0)",
        "'failed', '[]', err, 0, 0)",
    ),
}

BROKER = {
    "FETCH asks for no lease": ("fetch", "redis.call('EXISTS', lease) == 0", "false"),
    "FETCH does not repeat itself": ("fetch", "if known then", "if false then"),
    "FETCH charges a repeat to nobody": ("fetch", "e[5], e[6], e[7])", "e[5], 0, 0)"),
    "FETCH sorts from the back": ("fetch", "'RPOP', list", "'LPOP', list"),
    "FETCH takes a tenant's last": ("fetch", "'ZRANGE', 'penstock:turn:'", "'ZREVRANGE', 'penstock:turn:'"),
    "FETCH puts what came back behind the others": (
        "fetch",
        "if number and redis.call('HDEL'",
        "if not number and redis.call('HDEL'",
    ),
    "FETCH weighs nobody": ("fetch", "charge / weight)", "charge)"),
    "FETCH counts tasks, not tokens": ("fetch", "math.max(h.tokens, 1), weight_of", "1, weight_of"),
    "FETCH holds all up for a tenant's suspect": (
        "fetch",
        "heads[best] = head(best)\n        best",
        "heads[best] = nil\n        best",
    ),
    "who was served least is not next": (
        "fetch",
        "redis.call('ZRANGE', 'penstock:turns:' .. list, place, place)",
        "redis.call('ZREVRANGE', 'penstock:turns:' .. list, place, place)",
    ),
    "a rest saves up": ("fetch", "math.max(served, least_served(list) or 0)", "served"),
    "a rest forgives": ("fetch", "math.max(served, least_served(list) or 0)", "least_served(list) or 0"),
    "a tenant without tasks keeps its turn": ("fetch", "not oldest(list, tenant)", "false"),
    "FETCH takes out what is between": ("fetch", "numbers[k + 1] ~= number + 1", "not numbers[k + 1]"),
    "ACK lets pass whoever was served least": ("ack", "math.max(least, served + more)", "served + more"),
    "ACK sets nothing right": ("ack", "correct(e, math.max(1, tonumber(ARGV[3])))", ""),
    "ACK gives an ordinary task for nothing": ("ack", "math.max(1, tonumber(ARGV[3]))", "tonumber(ARGV[3])"),
    "BACK marks no place": ("back", "redis.call('HSET', KEYS[3], e[3], e[8])", ""),
    "BACK charges for nothing": ("back", "correct(e, 0)", ""),
    "RECALL turns the order round": ("recall", "'RPUSH', list, back[i][2]", "'LPUSH', list, back[i][2]"),
    "RECALL puts what came back before what stood before it": ("recall", "oldest and r[1] > oldest", "false"),
    "RECALL forgets where the first stood": ("recall", "oldest and r[1] > oldest", "oldest"),
    "RECALL leaves the number of what is in its place": ("recall", "redis.call('HDEL', 'penstock:returned', r[3])", ""),
    "RECALL takes from the living": ("recall", "lives_at(listed[k], level)", "false"),
    "RECALL is held up by everybody": ("recall", "takers[listed[k + 1]] and", ""),
    "LEASE lists nobody": ("lease", "redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])", ""),
    "LEASE revives what lapsed": ("lease", "ARGV[4] == '0' and", "false and"),
    "LEASE lists who is gone again": ("lease", "if ARGV[4] == '1' then", "if true then"),
    "LEASE lasts for ever": ("lease", ", 'PX', ARGV[3])", ")"),
    "STRAYS finds what is held": ("strays", "if not held[uuid]", "if true"),
    "STRAYS finds nothing": ("strays", "if not held[uuid]", "if false"),
    "ADOPT takes from the living": ("adopt", "lives_at(listed[k], level)", "false"),
    "BACK does not move": ("back", "ARGV[3 + e[5]] or e[2]", "e[2]"),
    "BACK moves to another tier": ("back", "ARGV[3 + e[5]]", "ARGV[3]"),
    "ADOPT leaves what was sorted": ("adopt", "repeat until unsort(KEYS[k], 1000) == 0", ""),
    "FETCH lets a lower tier pass": ("fetch", "blocked = heads[best].tier\n", "heads[best] = nil\n"),
    "FETCH holds up higher tiers": ("fetch", "best = blocked > 0 and -1 or nil", "best = nil"),
    "FETCH believes numbers in strings": ("fetch", "type(value) == 'number' and", "tonumber(value) and"),
    "FETCH believes NaN": ("fetch", "e[7] > 0", "not (e[7] <= 0)"),
    "FETCH lets no list age": ("fetch", "math.floor((now - since) / ageing)", "0"),
    "FETCH believes in a wait yet to come": ("fetch", "not since or since > now", "not since"),
    "FETCH gives suspects together": ("fetch", "suspect(heads[best].id) and holds_suspect()", "false"),
    "FETCH condemns too late": ("fetch", "n >= limit and 'condemned'", "n > limit and 'condemned'"),
    "FETCH takes an empty id for one": ("fetch", "or m.headers.id == ''", ""),
    "FETCH drops poison": ("fetch", "redis.call('RPUSH', dead,", "redis.call('RPUSH', dead .. ':lost',"),
    "FETCH buries without a word": ("fetch", "for _, told in ipairs(buried) do", "for _, told in ipairs({}) do"),
    "ACK keeps no dead letter": ("ack", "ARGV[2] ~= ''", "false"),
    "ACK forgets no return": ("ack", "redis.call('HDEL', KEYS[2], e[3])", ""),
    "BURY keeps no letter": ("bury", "redis.call('RPUSH', KEYS[2], cjson.encode(letter))", ""),
    "BURY leaves the message": (
        "bury",
        "redis.call('LREM', KEYS[1], 1, ARGV[1])",
        "#redis.call('LPOS', KEYS[1], ARGV[1], 'COUNT', 1)",
    ),
    "BURY keeps what is not there": ("bury", "redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0", "false"),
    "BURY removes copies, too": ("bury", "KEYS[1], 1, ARGV[1]", "KEYS[1], 0, ARGV[1]"),
    "BURY forgets no return": ("bury", "redis.call('HDEL', KEYS[3], ARGV[2])", ""),
    "BURY leaves the number of its place": ("bury", "redis.call('HDEL', KEYS[4], ARGV[2])", ""),
    "MOVE leaves the message": (
        "move",
        "redis.call('LREM', KEYS[1], 1, ARGV[1])",
        "#redis.call('LPOS', KEYS[1], ARGV[1], 'COUNT', 1)",
    ),
    "MOVE puts it behind the others": ("move", "'RPUSH'", "'LPUSH'"),
    "MOVE makes what is not there": ("move", "redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0", "false"),
    "MOVE takes copies along": ("move", "KEYS[1], 1, ARGV[1]", "KEYS[1], 0, ARGV[1]"),
    "BACK returns what is not there": ("back", "if not packed then\n  return 0\nend", ""),
    "BACK puts it behind the others": ("back", "redis.call('RPUSH', ARGV[3", "redis.call('LPUSH', ARGV[3"),
    "BACK knows no delay": ("back", "delay > 0", "false"),
    "REAP robs the living": ("reap", "local early = left ~= -2", "local early = false"),
    "REAP turns the order round": ("reap", "a[1] > b[1]", "a[1] < b[1]"),
    "REAP takes early whom nobody found silent": ("reap", "or not silent(ARGV[1], ARGV[2], ARGV[3])", ""),
    "REAP goes by a looker that is not heard": ("reap", "heard[me] and not heard[inc]", "not heard[inc]"),
    "REAP takes who is heard": ("reap", "heard[me] and not heard[inc]", "heard[me]"),
    "REAP believes that everybody listens": ("reap", "said.listens == true", "true"),
    "REAP goes by what a lease said before": ("reap", "(tonumber(said.joins) or 0) >= tonumber(since)", "true"),
    "REAP believes no joins": ("reap", "(tonumber(said.joins) or 0)", "0"),
    "LEASE tells no joins": ("lease", "' .. joins() .. '", "0"),
    "REAP returns ordinary tasks early": ("reap", "early and e[6] == 0", "false"),
    "REAP notes nothing": ("reap", "    note_taken(ARGV[1], e[3])\n", ""),
    "LEASE does not ask who listens": ("lease", "not hear({ inc })[inc]", "false"),
    "REAP counts nothing": ("reap", "redis.call('HINCRBY', KEYS[4], e[3], 1)", ""),
}


@pytest.mark.parametrize("broken", few(STORE, *SOON))
def test_a_broken_store_script_is_noticed(broken: str, valkey: Redis) -> None:
    notices(check_store, valkey, Mutant(protocol.PACKAGE, *STORE[broken]), examples=EXAMPLES, steps=40)


ALIVE = {
    "RETRACT takes back again": ("retract", "redis.call('HSET', taken, task, 0)", ""),
    "RETRACT takes nothing back": ("retract", "task, -raised", "task, 0"),
    "JOIN counts nobody": ("join", "'INCR', 'penstock:joins'", "'GET', 'penstock:joins'"),
}


@pytest.mark.parametrize("broken", ALIVE)
def test_a_broken_script_of_the_living_is_noticed(broken: str, valkey: Redis) -> None:
    notices(check_broker, valkey, Mutant(leases.PACKAGE, *ALIVE[broken]), examples=EXAMPLES, steps=40)


@pytest.mark.parametrize("broken", few(BROKER, *SOON_OF_BROKER))
def test_a_broken_broker_script_is_noticed(broken: str, valkey: Redis) -> None:
    notices(check_broker, valkey, Mutant(broker.PACKAGE, *BROKER[broken]), examples=EXAMPLES, steps=40)
