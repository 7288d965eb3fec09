"""Runs a command for a launcher; should the launcher die, the command and all it started are killed.

The launcher holds the other end of this process's standard input, which is closed when it dies. Run as a script, it
imports nothing of the package and so starts fast. It must lead a process group.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command; its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the command decides what they mean
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
