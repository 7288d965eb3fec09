"""`python -m reproduction nn --scale quick`: the same command as `fednmap reproduce`, with the same exit codes."""

from fednmap.cli import Later, main

main(Later("reproduce", "reproduction.command", "reproduce", ""), "python -m reproduction")
