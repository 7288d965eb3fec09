"""`python -m reproduction nn --scale quick`: the same command as `fednmap reproduce`, with the same exit codes."""

from fednmap.cli import LazyCommand, main

main(LazyCommand("reproduce"), "python -m reproduction")
