"""Imported last by the process that others are forked from (`tests.warm`).

Their garbage collectors leave alone what it has imported: a walk over it costs each of them a tenth of a second, and a
copy of every page that it marks.
"""

import gc

gc.collect()
gc.freeze()
