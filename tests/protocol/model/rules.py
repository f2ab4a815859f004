"""Every rule of the protocol, each of which can be dropped to see what it is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """`scenario` shows what breaks without it; `behind`: rules that hide it, and are dropped with it to show it."""

    scenario: str
    says: str
    behind: tuple[str, ...] = ()


RULES: dict[str, Rule] = {
    # the record
    "admit_absent": Rule("producer", "ADMIT writes only where there is no record"),
    "admit_nonce": Rule(
        "rival", "ADMIT tells a request sent again (mine) from another's request for the same id (exists)"
    ),
    "submit_window": Rule("producer", "a producer stops retrying long before sweeper age and record TTL"),
    "mark_cas": Rule("producer", "QUEUED changes the status only from submitting"),
    "sweeper": Rule("producer", "a sweeper re-sends records stuck in submitting"),
    "index_left": Rule("producer", "whatever takes a record out of submitting takes it out of the sweeper's index"),
    "claim_lease": Rule("lapse", "CLAIM refuses a caller whose own lease is gone"),
    "claim_live": Rule("split", "CLAIM answers busy while the owner's incarnation is live"),
    "claim_idem": Rule("lost", "CLAIM called again with the stored claim repeats its answer"),
    "gone_drop": Rule("producer", "CLAIM makes a record only for plain messages; a client's without record is acked"),
    "claim_dates": Rule("producer", "CLAIM of what its sender has not yet called queued says that it is, now"),
    "owner_first": Rule("cancel", "CLAIM looks for a live owner before it finalises a cancelled or expired task"),
    "claim_version": Rule("versions", "CLAIM refuses what was begun, or sent, to a worker of another version"),
    "claim_pool": Rule("pools", "CLAIM leaves what was begun to the pool that has it, while a worker of that lives"),
    "claim_level": Rule("levels", "CLAIM leaves what needs a later release to a worker of that, on its queue"),
    "progress_absolves": Rule("slow", "CLAIM counts against a task only the deaths since its last new token"),
    "append_claim": Rule("crash", "APPEND compares the claim"),
    "append_index": Rule("lost", "APPEND compares the index with the choice's next"),
    "append_final": Rule("cancel", "APPEND refuses a final record", behind=("owner_first",)),
    "prompt_fence": Rule("prompt", "PROMPT compares the claim and refuses a final record"),
    "prompt_once": Rule("prompt", "PROMPT called again answers ok and writes nothing"),
    "prompt_first": Rule(
        "prompt", "APPEND and FINISH take nothing where the prompt's entry is to stand first and does not (lost tail)"
    ),
    "finish_fence": Rule("crash", "FINISH compares the claim and refuses a final record"),
    "finish_idem": Rule("lost", "FINISH called again by the winning claim answers won"),
    "finish_next": Rule("tail", "FINISH compares the caller's next index (a failover may have lost the tail)"),
    "finish_cancel": Rule("cancel", "FINISH never writes another status over an accepted cancel"),
    "cancel_wins": Rule("cancel", "FINISH under an accepted cancel itself writes cancelled and answers won"),
    "cancel_submitting": Rule(
        "eager-producer",
        "CANCEL finalises a task nobody live owns at once, but only flags one that is still submitting",
    ),
    "cancel_swept": Rule(
        "cancel", "EXPIRE also ends what was cancelled while a worker had it, or before it was sent, and nobody has"
    ),
    "expire_cancel": Rule("cancel", "EXPIRE under an accepted cancel writes cancelled"),
    "delete_ends": Rule(
        "delete", "DELETE makes final what has not ended, with terminal entry, before it goes; in one script"
    ),
    "delete_rows": Rule("delete", "DELETE takes a task's rows along, in the same script"),
    "erase_noted": Rule("delete-plain", "DELETE notes the id, by which CLAIM makes no record of its message again"),
    "erase_result": Rule(
        "delete-plain", "whoever gets a deleted task's message removes the result that was stored since, before ACK"
    ),
    "revoke_noted": Rule(
        "revoke", "REVOKE notes an id without a record, and CLAIM cancels what a plain message then makes of it"
    ),
    "revoke_owned": Rule("revoke-running", "REVOKE leaves what a live worker runs to that worker, which hears it, too"),
    "late_begun": Rule(
        "cancel", "past its deadline, a task that was ever taken up is incomplete, and keeps what it has; others fail"
    ),
    "expire_submitting": Rule("late-producer", "EXPIRE leaves a task that is still submitting to the sweeper"),
    "end_in_script": Rule("cancel", "whatever makes a record final appends the terminal entry in the same script"),
    "settle_claimed": Rule("drain", "claim and owner stand until SETTLE: a final record with a live owner is busy"),
    "ttl_settled": Rule("sqs-lost", "a record's TTL starts at SETTLE, not at FINISH"),
    "release_fence": Rule("drain", "RELEASE compares the claim"),
    "release_final": Rule(
        "drain", "RELEASE clears the claim on a final, unsettled record too (FINISH's reply was lost)"
    ),
    "orphan_sweeper": Rule(
        "orphan", "ORPHAN settles what is final, unsettled and nobody's: its message may be gone, or nobody takes it"
    ),
    "orphan_message": Rule(
        "orphan-plain", "ORPHAN leaves what needs its message (links, a dead letter) while that is anywhere to be found"
    ),
    "compact_settled": Rule("compact", "COMPACT takes only the stream of a settled record"),
    "compact_once": Rule("compact", "COMPACT writes the result and removes the stream in one script"),
    # the counts of what waits
    "waits_noted": Rule(
        "crash", "a record says that it is counted: a second CLAIM, or its end, uncounts it once alone"
    ),
    "claim_uncounts": Rule("crash", "CLAIM counts what it starts no more, in the same script"),
    "final_uncounts": Rule("cancel", "whatever makes a record final counts it no more, in the same script"),
    "release_counts": Rule("drain", "RELEASE counts again what is not final, in the same script"),
    "bury_ends": Rule(
        "broken", "RELEASE of what becomes a dead letter ends it, so that whoever polls it hears of that"
    ),
    # the broker
    "ack_uuid": Rule("drain", "ACK and BACK name a fresh delivery UUID, not the message's own tag"),
    "fetch_atomic": Rule("crash", "FETCH pops and enters the delivery in flight in one script"),
    "fetch_idem": Rule("lost", "the caller names the delivery UUID; FETCH called again with it repeats its answer"),
    "reap_counts": Rule("killer", "REAP counts what comes back, and FETCH says condemned at N returns"),
    "condemned_first": Rule("killer", "a condemned message is claimed by its id before anyone decodes it"),
    "condemned_fails": Rule("killer", "CLAIM(condemned) fails a record that nobody ever lived to take up"),
    "suspect_alone": Rule("innocent", "FETCH gives an incarnation one message at its last chance at a time"),
    "survived_got_on": Rule(
        "innocent", "returns are forgotten only once the task got on: who dies with it must find it a suspect"
    ),
    "ack_settled": Rule(
        "undone", "ACK of a settled task takes nothing where its record is not settled: a failover lost that"
    ),
    "ack_reason": Rule("poison", "a task given up is acked with a reason, which keeps its message as a dead letter"),
    "letter_noted": Rule(
        "poison", "SETTLE says in the record that the message is to be kept, and CLAIM that answers done says it again"
    ),
    "bury_release": Rule(
        "broken",
        "a worker that cannot use a record it has claimed RELEASEs it before its message is kept: no copy waits",
    ),
    "lease_listed": Rule("scaled", "LEASE enters a new incarnation where REAP finds it, in the same script"),
    "lease_renews": Rule("scaled", "LEASE renews what is there alone: of what lapsed, REAP may know nothing any more"),
    "recall": Rule("scaled", "RECALL puts what dead workers had sorted back where whoever starts workers sees it"),
    "recall_unserved": Rule("scaled", "RECALL takes nothing from a queue that a live worker serves"),
    "recall_able": Rule("levels-sent", "RECALL counts only workers that can do what waits there"),
    "adopt": Rule("pools", "ADOPT moves what waits for a pool without workers to its version's queue"),
    "adopt_unserved": Rule("pools", "ADOPT takes nothing from a pool that a live worker serves"),
    "adopt_level": Rule("levels-pools", "ADOPT moves what needs a level to the version's queue of that level"),
    "adopt_able": Rule("levels-pools", "ADOPT counts only workers of that level: others of the pool take nothing"),
    "sweeper_reaps": Rule("scaled", "a sweeper REAPs, too: where no worker lives, nobody else would"),
    # dead before their lease lapses
    "look_heard": Rule(
        "alive-cut", "a look counts only where the looker's own channel has a listener, in the same call"
    ),
    "looker_stood": Rule(
        "alive-cut", "who looks has been heard there for a lease, or has joined: lease values from before say nothing"
    ),
    "value_since": Rule("alive-cut", "who joined, and was not heard for a lease, judges only values written since"),
    "join_anew": Rule("alive-cut-again", "a new subscription joins anew: another was before what the server dropped"),
    "joins_said": Rule("alive-uncounted", "a value without the counter says nothing to who only joined"),
    "lease_tells": Rule("alive-cut", "LEASE asks the server itself whether its worker is heard, and writes that"),
    "listens_said": Rule("alive-old", "only a worker whose lease value says that it listens is taken early"),
    "look_twice": Rule("alive", "two looks, so far apart that a living worker has renewed its lease in between"),
    "both_asked": Rule("alive-split", "both servers must find it silent, or its store's lease gone"),
    "reap_asks": Rule("alive", "END and REAP ask once more, in the script that takes"),
    "store_first": Rule("alive-split", "the store's lease ends before REAP returns the messages: CLAIM would say busy"),
    "reap_whole": Rule("alive", "REAP takes the lease with the messages: else its worker fetches, and nobody lists it"),
    "deaths_back": Rule("alive", "a living worker that was taken takes back the deaths counted against its tasks"),
    "reaped_back": Rule("alive-counts", "it takes back the returns that REAP counted, too"),
    "release_first": Rule("alive", "it RELEASEs all before that: no CLAIM counts another afterwards"),
    # SQS and its books
    "index_first": Rule("books-producer", "a sender enters its message in the index before it sends"),
    "note_lease": Rule("books-lapse", "NOTE refuses a worker without a lease: what it received goes back"),
    "note_once": Rule("books", "NOTE takes the entry from the index and enters the field in one script"),
    "back_books": Rule("books-drain", "BACK changes the books, then the visibility"),
    "back_gone": Rule("books-lapse", "BACK without a field does nothing: another may have the message"),
    "down_settled": Rule("books-retry", "DOWN takes an entry from the index only of a task that is settled or gone"),
    "letter_deleted": Rule("books-broken", "REAP deletes a message whose dead letter was kept, and shows it to nobody"),
    "reap_index": Rule("books-reap", "REAP enters messages in the index before it makes them visible"),
    "reap_given": Rule("books-innocent", "REAP counts what a worker was given, not what waited in its buffer"),
    "reap_over": Rule("books-killed", "REAP forgets the returns of what it finds marked as over: DOWN will not come"),
    "settled_only": Rule("books-scaled", "a task that is final and not settled stays in the index"),
    "delay_once": Rule("books-later", "DELAY stores a message and removes its field in one script"),
    "due_kept": Rule("books-later", "what is due stays in the store until it is sent"),
    "tidy": Rule("books-tidy", "a sweeper removes entries of settled tasks: a second copy may have left one"),
    "sent_anew": Rule("books-old", "what SQS will drop is sent anew"),
    "entry_age": Rule("books-old", "the entry of what comes back is as old as its message"),
    "old_anew": Rule("books-old", "who hands back what SQS will drop sends it anew, and deletes it"),
    "lost_anew": Rule("books-undone", "a hand-back of what SQS does not have any more sends it anew"),
    # the worker
    "strays": Rule("strays", "a live worker RELEASEs, and gives BACK, what is in flight under its name unknown to it"),
    "strays_twice": Rule(
        "strays-slots", "only what it finds twice, with its books read before each look: else it may just be arriving"
    ),
    "again_stored": Rule(
        "again", "whoever gets a plain message of a settled task stores its result again, and then looks for the record"
    ),
    "tracer_unless_native": Rule(
        "plain", "FINISH settles only tasks in which Celery has no part: of others the tracer comes before SETTLE"
    ),
    "tracer_after": Rule("crash", "the tracer (result, links) runs after a won FINISH"),
    "not_busy_back": Rule("split", "every answer but go/settle/done/gone gives the delivery BACK; never held or acked"),
    "plain_again": Rule(
        "undone-plain", "a plain task's delivery goes BACK where its record is gone: a failover lost that"
    ),
    "busy_no_ack": Rule("sqs", "a busy answer does not acknowledge the message"),
    "abandon_ends": Rule("crash", "a task is put down only by SETTLE, RELEASE or the end of the incarnation"),
    "lapse_release": Rule(
        "alone", "a worker whose lease lapsed, and who lives, RELEASEs what it held and gives it BACK: that is no death"
    ),
    "lapse_first": Rule("alone", "it does so before its new incarnation fetches"),
    "settle_answer": Rule(
        "undone", "a SETTLE that finds the record not final gives the delivery BACK", behind=("ack_settled",)
    ),
    "retry_order": Rule("retry", "retry: publish the copy, then RELEASE, then ACK"),
    # the outbox
    "row_in_script": Rule("outbox", "whatever makes a record final writes its events' rows in the same script"),
    "progress_once": Rule("outbox", "CLAIM tells of in_progress at a task's first start alone"),
    "row_same_store": Rule("outbox-undone", "rows stand on the record's server: a failover loses both, or neither"),
    "row_outlives": Rule("outbox-plain", "a row does not go with its record, whose TTL may end first"),
    "row_lease": Rule("outbox", "TAKE leases a row: it is due again if its deliverer says nothing for a lease"),
    "row_holder": Rule("outbox-rows", "DELIVERED, RETRY and DEAD compare the holder, which is another in each TAKE"),
    "deliver_first": Rule("outbox", "a row is marked as delivered after its receiver has answered"),
    "dead_kept": Rule("outbox-rows", "DEAD keeps the row, to be shown and replayed"),
    "untaken_free": Rule("outbox-untaken", "UNTAKEN gives up only rows that nobody holds"),
    # the reader
    "reader_dedupe": Rule("reader", "a reader drops by index what it has seen"),
    "reader_reread": Rule("reader", "a reader reads the stream again on a gap or silence"),
    "follow_proven": Rule(
        "follow-old", "a reader leaves a task's channel only for one that its process has heard of the task on"
    ),
    "follow_reread": Rule("follow", "whoever listens to a task's channel again reads the stream again"),
    "release_tells": Rule(
        "follow-old", "RELEASE tells those who follow a task by their process's channel: another may not know that"
    ),
    "read_stream_first": Rule("compact", "a reader looks for the stream first, then for the compact result"),
    "unread_lease": Rule("unread", "UNREAD cancels only where the lease is the one that was found lapsed"),
}

ALL = frozenset(RULES)
