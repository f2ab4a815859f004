"""Rolling updates: brings new workers up, moves new tasks to them, waits until the old version has nothing left.

    begin: check, write the record ─▶ starting: wait for ready workers ─▶ publish the card ─▶ draining: wait ─▶ done

begin checks what is asked for, and writes the record (`producers.store.fleet.rollouts`, which also says what happens
when a process dies); carry takes a record from phase to phase; seen tells what the fleet says of its two versions.
"""
