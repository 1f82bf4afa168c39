"""Measurements: `kvlane bench NAME`, which is `python -m kvlane.bench NAME`.

A subcommand is a module with `NAME`, `HELP`, `add_arguments(parser)` and `run(arguments) -> int` (the exit status),
named in `SUBCOMMANDS` of `__main__.py`. `report.py` writes what they found, `pictures.py` says what a picture shows,
and `drawing.py` draws that.
"""
