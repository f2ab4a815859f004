"""Repairs what dead processes left behind, one file a kind of duty. Any number of sweepers run; one leads.

sweeper runs the duties: at all gateways those of tasks, at the leader all others
tasks sends accepted tasks again, ends late ones, settles final ones; celery_results stores their Celery results
compact shrinks settled streams; queues looks after queues without workers; batches/ takes batches forward
retention removes what nobody needs: files, webhooks, dead letters, remains of deleted tasks, the ledger's rows
"""
