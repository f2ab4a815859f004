"""Repairs what dead processes left behind, one file a duty. Any number of sweepers run; leader lets one lead.

unsent sends accepted tasks again; reader_leases cancels tasks of lost readers; deadlines ends late tasks
unsettled settles final tasks, celery_results stores their Celery results; compact shrinks settled streams
orphaned_queues and retired_pools look after queues without workers; stale removes what nobody needs
files removes expired files
"""
