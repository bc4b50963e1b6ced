"""The Triton kernels: compared with float64 in the interpreter or on a GPU, and compiled for four chips.

TRITON_INTERPRET is read when a kernel is defined, so the kernels run in a subprocess.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from dflash_core.kernels import block_attention_triton, linear_cross_entropy_triton  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def run_module(*arguments, environment=None):
    """Run `python -m` with `arguments` in the root; fail unless it exits with 0."""
    command, environment = [sys.executable, "-m", *arguments], os.environ | (environment or {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def run_cases(**environment):
    cases = "tests/support/triton_cases.py"
    return run_module("pytest", "-q", "-p", "no:cacheprovider", cases, environment=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run on the GPU")
def test_interpreted_kernels_match_float64():
    output = run_cases(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert int(re.search(r"(\d+) passed", output).group(1)) >= 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_this_gpu_match_float64():
    run_cases()


def test_kernels_compile_for_four_chips_within_shared_memory_and_without_spills():
    report = json.loads(run_module("benchmarks.kernels_aot").splitlines()[-1])
    compiled = {(r["kernel"], r["capability"]) for r in report["results"]}
    kernels = ("forward", "backward_queries", "backward_keys", "row")
    assert compiled == {(kernel, chip) for kernel in kernels for chip in (80, 90, 100, 120)}
    for result in report["results"]:
        assert result["spilled_bytes"] == 0, result
        assert result["shared_kb"] <= result["shared_limit_kb"], result
        assert 0 < result["registers"] <= 255


def test_block_ranges_of_a_hand_drawn_pack():
    """Samples of 10 and 6 rows, anchors 3, 6, 9 and 12; tiles of 4 rows.

    rows     0..3   4..7   8..11   12..15
    some     3 6 9  6 9    9 12    -          block 0 sees 0..2 only: part of the first tile
    whole      6 9    9    -       -          block 3 sees 10, 11: part of the third
    """
    start, anchor = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 0, 10], [3, 6, 9, 12]))
    sizes = {"num_keys": 16, "tile_keys": 4, "block_size": 2, "window": 0}
    ranges = block_attention_triton._block_ranges(start, anchor, **sizes)
    some = [list(range(first, last)) for first, _, _, last in ranges.tolist()]
    whole = [list(range(first, last)) for _, first, last, _ in ranges.tolist()]
    assert some == [[0, 1, 2], [1, 2], [2, 3], []]
    assert whole == [[1, 2], [2], [], []]


def test_block_ranges_with_a_sliding_window():
    """One sample of 12 rows, window 5: slot k of anchor a sees rows > a + k - 5. Anchors 4, 8, 12; K = 2.

    anchor 4: slots see 0..3, 1..3; anchor 8: 4..7, 5..7; anchor 12: 8..11, 9..11. Both slots of a block see
    no whole tile of 4 rows; of the tiles of 3 (0..2, 3..5, 6..8, 9..11) those of 12 see all of the last.
    """
    start, anchor = torch.zeros(3, dtype=torch.int32), torch.tensor([4, 8, 12], dtype=torch.int32)
    sizes = {"num_keys": 12, "block_size": 2, "window": 5}
    fours, threes = (
        block_attention_triton._block_ranges(start, anchor, tile_keys=rows, **sizes).tolist()
        for rows in (4, 3)
    )
    assert [(r[0], r[3]) for r in fours] == [(0, 1), (1, 2), (2, 3)]
    assert all(r[1] == r[2] for r in fours)
    assert [(r[0], r[3]) for r in threes] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert [r[2] - r[1] for r in threes] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("positions", "soft", "rows"),
    [(7_680, False, 256), (7_680, True, 128), (15_360, False, 512), (10**6, False, 1024), (40, False, 40)],
)
def test_chunk_rows_keep_the_workspace_below_a_tenth_of_the_logits(positions, soft, rows):
    assert linear_cross_entropy_triton.chunk_rows(positions, soft=soft) == rows
    if positions > 1000:
        # one or two float32 workspaces, compared with the bfloat16 logits of all positions
        assert 4 * rows * (2 if soft else 1) < 0.1 * 2 * positions
