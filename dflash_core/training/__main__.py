"""A rank of a training run: `torchrun ... -m dflash_core.training run.json`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from dflash_core.errors import Stopped, UserError
from dflash_core.launch.rank_status import RankRecord, reporting
from dflash_core.launch.stop_signal import StopSignal, end_with_parent

EXIT_STOPPED = 143


def main(path: Path) -> int:
    """Exit code: 0 finished, 1 failed (the report is in the run's directory), 143 stopped by a signal."""
    stop = StopSignal()  # before anything slow
    end_with_parent()
    from dflash_core.launch.layout import make_layout, role_of
    from dflash_core.launch.process_groups import rank_of_process, set_up, tear_down
    from dflash_core.training.rank import run_rank
    from dflash_core.training.run import Run

    run = Run.load(path)
    rank = rank_of_process()
    record = RankRecord(run.directory, rank, role_of(make_layout(run.config.training), rank))
    try:
        with reporting(record):  # before peers see this rank's connections close
            spread = run.config.target.device_map is not None
            run_rank(run, set_up(run.config.training, spread_target=spread), record, stop)
    except Stopped:
        return EXIT_STOPPED
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    finally:
        tear_down()
    return 0


def run_and_end(path: Path) -> NoReturn:
    """End the process whatever its threads do: one that waits for a peer that is gone must not hold it up."""
    try:
        code = main(path)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_and_end(Path(sys.argv[1]))
