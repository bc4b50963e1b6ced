"""A clock that runs `DFLASH_CLOCK_SHIFT` seconds late (or early, where negative) once a file has appeared.

Python imports this module when it starts, where PYTHONPATH names its directory: every process of a command
has the same clock. Only `time.time` and `time.time_ns` are shifted: file times stay those of the system.
"""

import os
import time

_seconds = float(os.environ.get("DFLASH_CLOCK_SHIFT", "0"))
_switch = os.environ.get("DFLASH_CLOCK_SWITCH", "")
_time, _time_ns = time.time, time.time_ns


def _shift() -> float:
    return _seconds if os.path.exists(_switch) else 0.0


if _switch:
    time.time = lambda: _time() - _shift()
    time.time_ns = lambda: _time_ns() - int(_shift() * 1e9)
