"""`torchrun ... -m dflash_core.training run.json`: one rank of a training run, see `rank.py`."""

import sys
from pathlib import Path

from dflash_core.launch.stop_signal import StopSignal, end_with_parent

if __name__ == "__main__":
    stop = StopSignal()  # before the imports of a rank, which take seconds
    end_with_parent()
    from dflash_core.training.rank import run_and_exit

    run_and_exit(Path(sys.argv[1]), stop)
