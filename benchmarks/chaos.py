"""The whole pipeline under faults: whatever happens, the same command repeated ends with the same results.

    python -m benchmarks.chaos --minutes 60
    python -m benchmarks.chaos --only kill-flow --seed 3        # one kind of fault
    python -m benchmarks.chaos --minutes 10 --directory DIR     # files of failed rounds: DIR/failed

Claim: a run of train-dflash with a target rank and a drafter rank is struck at random moments by one of many
faults: processes killed, stopped or continued, a full disk, rewritten inputs, a clock that jumps back, a
second flow, `prune`, a tracking server that is locked or gone. The same command, repeated, succeeds. Report,
plans, losses and drafter then equal those of an undisturbed run bit for bit; no process, temporary file,
incomplete entry of the store or open note is left; and each command that failed has answered with one
message.

Every round starts with an empty storage root. A round whose fault found nothing to strike is `missed`, and
counts as no fault. Prints a line per round, a table of the kinds and one line of JSON; exits with 1 if
anything differed. The moments and victims follow from the seed, the fault and the number of its round.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import chaos_results
from benchmarks.support.chaos_faults import FAULTS, Fault, database_of
from benchmarks.support.chaos_scene import Ended, Scene, send
from benchmarks.support.chaos_served import SERVED, Served, served_round
from benchmarks.support.command import parser, print_json

# A fault strikes at most so many commands of a round.
MAX_STRIKES = 3
# The first command that nothing strikes has to succeed; `retry` faults may need one more.
MAX_COMMANDS = 6
# Differences of a round that are printed.
MAX_SHOWN = 12
# Share of the rounds in which the command is repeated once more after its success.
REPEATED_SHARE = 0.25


@dataclass
class Tally:
    """What the rounds of one kind of fault have come to."""

    rounds: int = 0
    strikes: int = 0
    failures: int = 0


class Chaos:
    """Rounds of faults in one directory, compared with an undisturbed run."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.expected: dict[str, Any] = {}
        self.seconds = 0.0
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.served: Served | None = None
        self.num_commands = 0
        self.failures: list[str] = []

    def run_undisturbed(self) -> None:
        """Run once without a fault; later rounds are compared with its results."""
        scene = Scene(self.root)
        scene.make_inputs()
        scene.clear()
        started = time.monotonic()
        try:
            ended = scene.end_of(scene.start())
        finally:
            send(scene.of("all"), signal.SIGKILL)
        if ended.code or ended.complaint():
            sys.exit(f"the undisturbed run failed: {ended.output}{ended.errors}")
        self.seconds = time.monotonic() - started
        self.expected = chaos_results.run_results(scene.runs)
        defects = scene.orphans() + chaos_results.defects(scene.runs, scene.temporary)
        self.report("undisturbed", 0, [f"{self.seconds:.0f} s"], defects, "ok")

    def report(self, name: str, number: int, story: list[str], defects: list[str], outcome: str) -> None:
        """Print a line, and the defects below it."""
        outcome = "FAILED" if defects else outcome
        print(f"{name:<18} {number:>3}  {outcome:<6}  {'; '.join(story)}", flush=True)
        for defect in defects:
            print(f"    {defect}", flush=True)
        if defects:
            self.failures.append(name)
            print(f"    again: --seed {self.seed} --only {name} --round {number}", flush=True)
            self._keep(f"{name}-{number}")

    def _keep(self, name: str) -> None:
        """Copy the storage root and the output of a failed round to where the next ones leave them."""
        kept = self.root / "failed" / name
        shutil.rmtree(kept, ignore_errors=True)
        # Prefect's server may still write.
        with contextlib.suppress(OSError):
            shutil.copytree(self.root / "runs", kept / "runs", symlinks=True)
        for pattern in ("*.out", "*.err", "*.log", "services/*.log"):
            for path in self.root.glob(pattern):
                shutil.copy(path, kept)

    def round(self, name: str, number: int | None = None) -> None:
        """Run the pipeline under one fault until it succeeds, and look at what it leaves.

        Args:
            name: of the fault.
            number: of the round; None: the next one.
        """
        tally = self.tallies[name]
        number, num_before = tally.rounds if number is None else number, tally.strikes
        tally.rounds += 1
        rng = random.Random(f"{self.seed} {name} {number}")
        story: list[str] = []
        defects: list[str] = []
        try:
            (self._served_round if name in SERVED else self._round)(name, rng, story, defects)
        except Exception as error:
            defects.append(f"{type(error).__name__}: {error}")
        tally.failures += bool(defects)
        self.report(name, number, story, defects, "ok" if tally.strikes > num_before else "missed")

    def _round(self, name: str, rng: random.Random, story: list[str], defects: list[str]) -> None:
        scene, fault = Scene(self.root, seconds=self.seconds), FAULTS[name]()
        scene.clear()
        fault.prepare(scene, rng)
        try:
            self.tallies[name].strikes += self._repeat(scene, fault, rng, story, defects)
            if rng.random() < REPEATED_SHARE:
                self._repeat_finished(scene, story, defects)
            self._compare(scene, database_of(scene), defects)
        finally:
            send(scene.of("all"), signal.SIGKILL)
            fault.close(scene)

    def _served_round(self, name: str, rng: random.Random, story: list[str], defects: list[str]) -> None:
        if self.served is None:
            self.served = Served(self.root, self.seconds)
            self.served.__enter__()
        self.tallies[name].strikes += served_round(self.served, name, rng, story, defects)
        self._compare(self.served.scene, self.served.scene.runs / "mlflow.db", defects)

    def _compare(self, scene: Scene, database: Path, defects: list[str]) -> None:
        defects += chaos_results.defects(scene.runs, scene.temporary, database)
        different = chaos_results.differences(chaos_results.run_results(scene.runs), self.expected)
        defects += different[:MAX_SHOWN]
        if len(different) > MAX_SHOWN:
            defects.append(f"and {len(different) - MAX_SHOWN} more")

    def close(self) -> None:
        """End the server and the worker."""
        if self.served is not None:
            self.served.__exit__()

    def _repeat(
        self, scene: Scene, fault: Fault, rng: random.Random, story: list[str], defects: list[str]
    ) -> int:
        """Repeat the command until it succeeds; the first ones are struck. Return how many were."""
        num_strikes = 1 if fault.is_survived else rng.choice([1, 1, 2, MAX_STRIKES])
        struck = 0
        for i in range(MAX_COMMANDS):
            is_struck, ended, words = self._command(scene, fault if i < num_strikes else None, rng, defects)
            struck += is_struck
            story.append(f"{words} -> {ended.code}")
            defects += scene.orphans()
            if complaint := ended.complaint():
                defects.append(complaint)
            # A finished run is only skipped by the next command.
            if ended.code == 0 and not (is_struck and fault.changes_inputs):
                return struck
            if ended.code and (fault.is_survived or not is_struck):
                defects.append(f"failed with {ended.code}: {ended.answer()}")
        defects.append(f"no success in {MAX_COMMANDS} commands")
        return struck

    def _repeat_finished(self, scene: Scene, story: list[str], defects: list[str]) -> None:
        """Repeat the command after its success: it has to skip the training."""
        self.num_commands += 1
        ended = scene.end_of(scene.start())
        defects += scene.orphans()
        if complaint := ended.complaint():
            defects.append(complaint)
        is_skipped = ended.code == 0 and "(skipped)" in ended.output
        story.append("skipped when repeated" if is_skipped else f"repeated -> {ended.code}")
        if not is_skipped:
            defects.append(f"a finished run is not skipped: {ended.code}, {ended.answer()}")

    def _command(
        self, scene: Scene, fault: Fault | None, rng: random.Random, defects: list[str]
    ) -> tuple[bool, Ended, str]:
        """Run the command once, with a fault or without; return whether it struck, the end, and words."""
        self.num_commands += 1
        scene.process = scene.start()
        if fault is None:
            return False, scene.end_of(scene.process), "undisturbed"
        when, is_now = fault.draw_moment(scene, rng)
        if not scene.wait_until(is_now):
            return False, scene.end_of(scene.process), f"ended before {when}"
        what = fault.strike(scene, rng)
        ended = scene.end_of(scene.process)
        defects += fault.mend(scene)
        return bool(what), ended, f"{what or 'nothing to strike'} at {when}"

    def print_table(self) -> None:
        """Print rounds, strikes and failures of each kind."""
        print(f"\n{'fault':<20} {'rounds':>6} {'struck':>6} {'failed':>6}")
        for name, tally in sorted(self.tallies.items()):
            print(f"{name:<20} {tally.rounds:>6} {tally.strikes:>6} {tally.failures:>6}")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--only", choices=sorted([*FAULTS, *SERVED]), nargs="+", default=[*FAULTS, *SERVED], metavar="FAULT"
    )
    arguments.add_argument("--round", type=int, help="one round of each fault, this one")
    arguments.add_argument("--directory", type=Path, help="work here, and keep the files of failed rounds")
    given = arguments.parse_args()
    # SIGTERM ends everything that was started as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Shells let commands in the background ignore SIGINT, and what these start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.directory or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(root, given.seed)
        try:
            chaos.run_undisturbed()
            order = list(given.only)
            random.Random(given.seed).shuffle(order)
            for name in order if given.round is not None else itertools.cycle(order):
                # On a machine of any speed, something is struck.
                if time.monotonic() > stop and any(tally.strikes for tally in chaos.tallies.values()):
                    break
                chaos.round(name, given.round)
        finally:
            chaos.close()
    chaos.print_table()
    tallies = chaos.tallies.values()
    print_json(
        {
            "seed": given.seed,
            "rounds": sum(tally.rounds for tally in tallies),
            "faults": sum(tally.strikes for tally in tallies),
            "commands": chaos.num_commands,
            "kinds": sum(tally.strikes > 0 for tally in tallies),
            "undisturbed_seconds": round(chaos.seconds, 1),
            "failures": chaos.failures,
        }
    )
    return 1 if chaos.failures else 0


if __name__ == "__main__":
    sys.exit(main())
