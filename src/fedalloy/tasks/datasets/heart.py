"""Heart disease in four hospitals (UCI): small, tabular, with natural clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import TWO_CLASSES, Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

Variant = Literal["aaggff", "flamby"]
CENTRES = ("cleveland", "hungarian", "switzerland", "va")


@register("dataset", "heart")
@dataclass(frozen=True)
class Heart(DatasetLoader):
    """Whether a patient has a heart disease: 4 centres as clients, one logit, scored by AUROC.

    Two ways of preparing the same UCI files, both unscaled (a task standardises with each client's training part):
    ``aaggff`` keeps all 920 patients and 15 features, with missing values set to the mean of the whole
    centre, so that test patients enter these means; ``flamby`` has the 740 patients without missing values, 13
    features and its own split into training and test, which a task then uses instead of ``test_fraction``.
    In Switzerland nearly all patients are ill (115 of 123, 45 of 46), so its AUROC is based on very few pairs.
    """

    variant: Variant = "aaggff"

    summary: ClassVar[str] = "920 (or 740) patients of 4 hospitals, 15 (or 13) features, 2 classes"
    files: ClassVar[dict[str, str]] = {
        "heart_aaggff.npz": "8ca6e570652d6ca1fc898e5463f7f1a533e353fd5770bdd445c7f4466f30c246",
        "heart_flamby.npz": "720159af8082c074d5f02baa9eba48488a323a078804da95107bfbcb460e43ec",
    }
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch heart', or make it from the four processed.*.data files of the UCI heart "
        "disease data (arrays x: float32 [N, features], y: int64 [N], client: 0..3 for Cleveland, Hungary, "
        "Switzerland, VA; flamby also is_train: bool [N])"
    )
    defaults: ClassVar[DatasetDefaults] = replace(TWO_CLASSES, standardise="client")

    def __post_init__(self) -> None:
        if self.variant not in get_args(Variant):
            raise SpecError(f"heart: unknown variant '{self.variant}': {nearest(self.variant, get_args(Variant))}")

    def load(self, key: Key) -> Dataset:
        """All patients with their centre; nothing is drawn."""
        flag = ("is_train",) if self.variant == "flamby" else ()
        arrays = read_npz(f"heart_{self.variant}.npz", ("x", "y", "client", *flag), self.hint)
        x, y, client = (torch.from_numpy(arrays[name]) for name in ("x", "y", "client"))
        held_out = ~torch.from_numpy(arrays["is_train"]) if flag else None
        return Dataset(x.to(torch.float32), y.to(torch.int64), 2, client.to(torch.int64), held_out, names=CENTRES)
