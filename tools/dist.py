"""Build the sdist and the wheel of the last commit, for a repository that is reachable by others.

    python tools/dist.py ADDRESS [OUT]          needs the package `build`; `twine check OUT/*` comes after it

ADDRESS is where the repository is read, such as https://example.org/group/fednmap. A package index shows the README
without the repository beside it: its links and pictures become absolute, by ADDRESS and the tag vVERSION, and the
addresses stand among the project's URLs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, address: str, tag: str) -> str:
    """Markdown whose relative links and pictures lead to the repository.

    >>> absolute("![a](docs/a.png) [b](b.md#c) [d](https://d.org) [e](#e)", "https://example.org/x", "v1")
    '![a](https://example.org/x/raw/v1/docs/a.png) [b](https://example.org/x/blob/v1/b.md#c) [d](https://d.org) [e](#e)'
    """

    def full(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(full, text)


def with_addresses(text: str, address: str, tag: str) -> str:
    """pyproject.toml that says where the project is."""
    places = {"Repository": "", "Documentation": f"/blob/{tag}/docs/index.md", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
    lines = [f'{name} = "{address}{path}"' for name, path in (*places.items(), ("Issues", "/issues"))]
    return text.replace("[project.scripts]", "\n".join(["[project.urls]", *lines, "", "[project.scripts]"]), 1)


def main(address: str, out: str = "dist") -> None:
    if not re.fullmatch(r"https://[^\s/]+(/[^\s/]+)*", address):
        raise SystemExit(f"dist.py: the address is {address!r}; give it as https://HOST/PATH, with no slash at its end")
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "x"], cwd=place, input=archive, check=True)
        project, readme = Path(place, "pyproject.toml"), Path(place, "README.md")
        tag = f"v{tomllib.loads(project.read_text())['project']['version']}"
        readme.write_text(absolute(readme.read_text(), address, tag))
        project.write_text(with_addresses(project.read_text(), address, tag))
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(Path(out).resolve()), place], check=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(f"{__doc__}")
    main(*sys.argv[1:])
