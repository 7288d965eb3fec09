"""Tables as they are: one file per site, numbers and words, gaps."""

from fednmap.tables.files import read, read_sites
from fednmap.tables.preprocessor import FederatedPreprocessor, Statistic
from fednmap.tables.table import Table, table

__all__ = ["FederatedPreprocessor", "Statistic", "Table", "read", "read_sites", "table"]
