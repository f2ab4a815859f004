"""What a hostile tenant does to the others: an attack a file, on a gateway process and a real Valkey.

    stage()          a Valkey, a gateway that asks for keys, keys of two tenants (`attacker`, `victim`) and of an admin
    the attack       raw sockets (`Stage.connect`, `Stage.request`) or plain HTTP (`Stage.http`) with the attacker's key
    what must hold   `Stage.http` with the victim's key, `/readyz`, revocation: counted answers, never a time

The tests assert what was refused and answered. What an attack costs the victim's latency is measured by a bench.
"""
