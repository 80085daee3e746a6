"""Whether a synthetic set reveals its training examples: distances to them compared with those to unseen examples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.tasks.metrics.ranking import auroc

_CHUNK = 256
_CLOSE = 0.01
_SIGMAS = 3.0
_MOST = 20_000


@dataclass(frozen=True)
class Leakage:
    """Nearest-neighbour statistics; without leakage both probabilities are about one half and there are no copies.

    ``to_train`` and ``to_held_out`` are mean distances (root mean square per feature) of a synthetic example to the
    nearest of equally many training and held-out examples. ``closer_to_train`` is the share that lies closer to a
    training example, ties counting half. ``membership_auc`` is how well the distance to the nearest synthetic example
    separates training examples from held-out ones, ``margin`` three standard errors of it. ``copies`` counts synthetic
    examples nearer to a training example than 99 % of the held-out ones are to any. ``suspicious``: the AUC exceeds its
    margin, or more than 5 % are copies.
    """

    to_train: float
    to_held_out: float
    closer_to_train: float
    membership_auc: float
    margin: float
    copies: int
    synthetic: int
    compared: int

    @property
    def suspicious(self) -> bool:
        """Whether this is more than chance would give."""
        return self.membership_auc > 0.5 + self.margin or self.copies > 0.05 * self.synthetic

    def to_json(self) -> dict[str, float | int | bool]:
        """Plain values."""
        return {**asdict(self), "suspicious": self.suspicious}


def leakage(synthetic: Tensor, train: Examples, held_out: Examples, key: Key) -> Leakage:
    """Compare distances to training and to held-out examples, equally many of each, drawn by key.

    Equally many, because among more examples the nearest is closer. Copies are searched among all training examples.
    """
    count = min(len(train), len(held_out), _MOST)
    if count < 2 or len(synthetic) < 1:
        raise DataError(
            f"the leakage check compares training with held-out examples and has {len(train)} and {len(held_out)}, and "
            f"{len(synthetic)} synthetic ones: it needs two, two and one; set test_fraction above 0"
        )
    made = _rows(synthetic)
    members, others = _some(train, count, key.fold("members"), made), _some(held_out, count, key.fold("others"), made)
    to_train, to_others = nearest(made, members), nearest(made, others)
    scores = -torch.cat([nearest(members, made), nearest(others, made)])
    truth = torch.cat([torch.ones(count), torch.zeros(count)])
    auc = float(auroc(scores, truth, torch.zeros(2 * count, dtype=torch.int64), 1)[0])
    closer = (to_train < to_others).double() + 0.5 * (to_train == to_others).double()
    return Leakage(
        to_train=float(to_train.mean()),
        to_held_out=float(to_others.mean()),
        closer_to_train=float(closer.mean()),
        membership_auc=auc,
        margin=_SIGMAS * math.sqrt((2 * count + 1) / (12 * count * count)),
        copies=copies(made, _rows(train.x, made), others),
        synthetic=len(made),
        compared=count,
    )


def copies(synthetic: Tensor, train: Tensor, held_out: Tensor) -> int:
    """Synthetic rows nearer to a training row than all but 1 % of the held-out rows are to any."""
    defaults = nearest(held_out, train).quantile(_CLOSE)
    return int((nearest(synthetic, train) < defaults).sum())


def nearest(rows: Tensor, among: Tensor) -> Tensor:
    """The distance of every row to the nearest of some others, root mean square per feature.

    >>> nearest(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([1.4142])
    """
    parts = [torch.cdist(part, among).min(1).values for part in rows.split(_CHUNK)]
    return torch.cat(parts) / math.sqrt(rows.shape[1])


def _some(examples: Examples, count: int, key: Key, like: Tensor) -> Tensor:
    return _rows(examples.x[key.choice(len(examples), count).to(examples.x.device)], like)


def _rows(x: Tensor, like: Tensor | None = None) -> Tensor:
    rows = x.reshape(len(x), -1)
    return rows.float() if like is None else rows.to(like)
