"""Ends what a launcher started, should the launcher die without doing so itself.

Reads `+PID` and `-PID` lines from the launcher; when the pipe closes, the process groups still listed are killed.
Run as a script, it imports nothing of the package and so starts at once.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the launcher counts
    groups: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(pid)
    for pid in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
