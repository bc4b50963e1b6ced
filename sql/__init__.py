"""The SQL of the length profile: one relation per file.

The first lines of a file name its grain, its key, its inputs and the rows that it drops. The text without
comments is in the key of the profile stage.
"""

from importlib.resources import files


def read(name: str) -> str:
    """Return the text of `name`.sql."""
    return files("sql").joinpath(f"{name}.sql").read_text(encoding="utf-8")
