"""Repairs what dead processes left behind, one file a duty. Any number of sweepers run; one leads.

unsent sends accepted tasks again; deadlines ends late tasks
unsettled settles final tasks, celery_results stores their Celery results; compact shrinks settled streams
queues/ looks after queues without workers; batches/ takes batches forward; outbox trims webhooks and tells of late ones
stale removes what nobody needs; files removes expired files; usage adds the ledger's rows to sums
"""
