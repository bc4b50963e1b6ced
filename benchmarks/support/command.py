"""The head and the last line that all benchmarks share."""

from __future__ import annotations

import argparse
import json
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a benchmark's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_json(figures: dict[str, Any]) -> None:
    """Print the figures as the last line, for programs."""
    print(json.dumps(figures))
