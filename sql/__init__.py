"""The SQL of the length profile: one relation a file, each with its grain, inputs and what it drops in the
first lines.
"""

from importlib.resources import files


def read(name: str) -> str:
    """The text of `name`.sql."""
    return files("sql").joinpath(f"{name}.sql").read_text(encoding="utf-8")
