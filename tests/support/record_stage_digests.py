"""The command that records the digests of the code behind each stage.

    python -m tests.support.record_stage_digests

Run it after a change to the code of a stage, once its `version` in tasks/ is raised where equal inputs could
now give other outputs. `tests/unit/test_stage_digests.py` compares.
"""

from __future__ import annotations

import json
import sys

from tasks.storage.code_digests import ROOT, code_digest

RECORDED = ROOT / "tests" / "unit" / "stage_digests.json"


def current() -> dict[str, dict[str, object]]:
    """Return version and code digest of each stage as they are now."""
    import tasks.advice
    import tasks.buckets
    import tasks.evaluate
    import tasks.ingest
    import tasks.length_profile
    import tasks.plans
    import tasks.regenerate
    import tasks.target  # noqa: F401
    from tasks.storage.stages import STAGES

    return {
        name: {"version": s.version, "code": code_digest(s.sources)} for name, s in sorted(STAGES.items())
    }


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(current(), indent=1) + "\n", encoding="utf-8")
    sys.exit(0)
