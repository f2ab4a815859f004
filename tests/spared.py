"""What is found out anew each time is found out once, in the processes of tests: here and in what `tests.warm` forks.

redis-py parses the description of its own package for each connection, which takes 3 ms of processor time; tests make
some ten thousand connections. Each process of ours asks git for the commit that it runs, once.
"""

from functools import cache

from redis import utils

from producers.release import release

utils.get_lib_version = cache(utils.get_lib_version)
release()
