"""Tables as they are: one file per site, numbers and words, gaps."""

from fednmap.tables.files import read, read_as_text, read_sites
from fednmap.tables.formula import FederatedFormula
from fednmap.tables.statistics import FederatedPreprocessor, Statistic
from fednmap.tables.table import Table, as_word, table

__all__ = [
    "FederatedFormula",
    "FederatedPreprocessor",
    "Statistic",
    "Table",
    "as_word",
    "read",
    "read_as_text",
    "read_sites",
    "table",
]
