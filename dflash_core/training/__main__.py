"""`python -m dflash_core.training run.json` is `python -m dflash_core.training.rank run.json`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("dflash_core.training.rank", run_name="__main__", alter_sys=True)
