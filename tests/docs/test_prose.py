"""The pages are easy to read: short lines, short sentences."""

import doctest
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in prose.pages()}


@pytest.mark.parametrize("page", TEXTS)
def test_lines_of_prose_are_short(page):
    assert prose.long_lines(TEXTS[page]) == []


def test_sentences_are_short():
    words = [length for text in TEXTS.values() for length in prose.lengths(text)]
    assert sum(words) / len(words) <= 20
    for page, text in TEXTS.items():
        own = prose.lengths(text) or [0]
        assert sum(own) / len(own) <= 20, page


def test_what_is_counted():
    assert doctest.testmod(prose).failed == 0
    assert prose.long_lines("a" * 161 + "\n| " + "b" * 200 + " |\n```\n" + "c" * 200 + "\n```\n") == ["a" * 161]
    assert prose.lengths("One two. Three `four five` $a + b$!\n\n    code\n") == [2, 3]


def test_a_command_has_at_most_20_options_outside_advanced():
    for name, counts in prose.panels().items():
        assert sum(count for panel, count in counts.items() if panel != "Advanced") <= 20, name
