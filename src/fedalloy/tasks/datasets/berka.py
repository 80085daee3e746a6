"""Loans of a Czech bank (Berka, PKDD'99): small, tabular, with regions as clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import TWO_CLASSES, Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_csv

Years = Literal["96", "mean"]
Row = dict[str, str]
_LOAN = ("amount", "duration", "payments", "date_between")
_DISTRICT = ("num_inhabitants", "average_salary", "entrepreneur_rate")
_YEARLY = ("unemployment", "crimes")
_COLUMNS = ("region", "default", *_LOAN, "frequency_id", *_DISTRICT, "average_order_amount")
_WITHOUT_DEFAULTS = "north Bohemia"


@register("dataset", "berka")
@dataclass(frozen=True)
class Berka(DatasetLoader):
    """Whether a loan defaults: the bank's regions as clients, one logit, scored by AUROC.

    12 features: amount, duration, payments, days from opening the account to the loan, two dummies for
    how often statements are sent (weekly, after a transaction; monthly is neither), inhabitants, average
    salary and entrepreneurs of the district, its unemployment and crimes, the average order. Three features
    of the published recipe need the bank's table of transactions and are not here. ``years = "96"`` takes
    unemployment and crimes of 1996 as that recipe does; ``mean`` averages 1995 and 1996 (8 loans have
    no value of 1995 and keep that of 1996). North Bohemia has a single default among 61 loans and is left out
    by default. Unscaled: a task standardises with each client's training part.
    """

    years: Years = "96"
    north_bohemia: bool = False

    summary: ClassVar[str] = "621 loans of a bank in 7 regions, 12 features, 2 classes (75 defaults)"
    files: ClassVar[dict[str, str]] = {
        "berka_loans.csv": "1019b055be9c9363323fb3d3c5a24e425d31afa15b4ddc0d1b51df02cf761ff5"
    }
    hint: ClassVar[str] = (
        "join the loan, account, district and order tables of the PKDD'99 financial data to one row per loan "
        f"(columns {', '.join(_COLUMNS)}, unemployment_95/96, crimes_95/96)"
    )
    defaults: ClassVar[DatasetDefaults] = replace(TWO_CLASSES, standardise="client")

    def __post_init__(self) -> None:
        if self.years not in get_args(Years):
            raise SpecError(f"berka: unknown years '{self.years}': {nearest(self.years, get_args(Years))}")

    def load(self, key: Key) -> Dataset:
        """The loans in the order of the file; nothing is drawn."""
        yearly = [f"{name}_{year}" for name in _YEARLY for year in ("95", "96")]
        rows = read_csv("berka_loans.csv", (*_COLUMNS, *yearly), self.hint)
        rows = [row for row in rows if self.north_bohemia or row["region"] != _WITHOUT_DEFAULTS]
        regions = tuple(sorted({row["region"] for row in rows}))
        owner = torch.tensor([regions.index(row["region"]) for row in rows])
        y = torch.tensor([int(row["default"]) for row in rows])
        return Dataset(torch.stack([self._features(row) for row in rows]), y, 2, owner, names=regions)

    def _features(self, row: Row) -> Tensor:
        frequency = [float(row["frequency_id"] == level) for level in ("1", "2")]
        before = [float(row[name]) for name in _LOAN]
        district = [float(row[name]) for name in _DISTRICT]
        yearly = [self._of_years(row[f"{name}_95"], row[f"{name}_96"]) for name in _YEARLY]
        return torch.tensor([*before, *frequency, *district, *yearly, float(row["average_order_amount"])])

    def _of_years(self, earlier: str, later: str) -> float:
        if self.years == "96" or not earlier:
            return float(later)
        return (float(earlier) + float(later)) / 2
