"""Look for known weaknesses of the installed packages; where no advisory database answers, list how old the pins are.

    python tools/audit_dependencies.py [--oldest DAYS]

Exit code 1 if pip-audit finds a weakness, or a pin of constraints.txt was set more than DAYS (default 365) ago.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def advisories() -> int | None:
    """pip-audit's exit code; None if it is not installed or reaches no database."""
    words = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--timeout", "10"]
    done = subprocess.run(words, capture_output=True, text=True)
    if "No module named" in done.stderr or "Error" in done.stderr:
        return None
    print(done.stdout, end="")
    return done.returncode


def ages() -> dict[str, int]:
    """Pin of constraints.txt -> days since it was set, by git."""
    words = ["git", "blame", "--porcelain", "constraints.txt"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found, times, commit = {}, {}, ""
    for line in lines:
        if re.match(r"[0-9a-f]{40} ", line):
            commit = line[:40]
        elif line.startswith("committer-time "):
            times[commit] = int(line.split()[1])
        elif "==" in line and line.startswith("\t") and not line.startswith("\t#"):
            found[line.strip()] = int(time.time() - times[commit]) // 86400
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oldest", type=int, default=365)
    oldest = parser.parse_args().oldest
    code = advisories()
    if code is not None:
        return code
    print("no advisory database; days since the pins were set:")
    found = ages()
    for pin, days in found.items():
        print(f"{days:5d}  {pin}{'  too old' if days > oldest else ''}")
    return int(any(days > oldest for days in found.values()))


if __name__ == "__main__":
    sys.exit(main())
