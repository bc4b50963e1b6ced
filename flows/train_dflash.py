"""Train a DFlash drafter: data, length profile, bucket edges, batch plans, training, acceptance, report."""
# ruff: noqa: E402 (the command line sets the environment before anything imports prefect)

import sys

from flows import cli

if __name__ == "__main__":
    sys.exit(cli.main("train-dflash"))

from flows.entry import run_flow


@run_flow("train-dflash")
def train_dflash(config, options):
    return config
