"""Child processes of this one.

supervisor keeps a child running and stops it; guard ends it with its parent; readiness hears what it tells by notify:
that it serves, and its leases, which ended_leases ends with it; standby has imported all that a worker needs, and
becomes the next one. The workers of `penstock up`, of `penstock worker --gpus` and of the autoscaler's local actuator
run by it.
"""

from __future__ import annotations

import sys
from typing import Final

#: The `penstock` command. -P keeps a folder named `workers` in the current directory from being imported instead of
#: ours.
PENSTOCK: Final = (sys.executable, "-P", "-m", "workers.cli")
