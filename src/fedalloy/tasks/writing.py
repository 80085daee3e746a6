"""What a module changes while it is called: a pure function of its leaves must not change them, nor keep a state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fedalloy.core.errors import SpecError
from fedalloy.core.types import Tree

_Mark = tuple[int, int]


class Writes:
    """Watches the calls of a probe. ``buffers``: whether exchanged buffers changed, which then depend on all rows of a
    batch."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.buffers = module, False
        self._counting: set[str] | None = None

    @contextmanager
    def seen(self, given: Tree, params: Tree, buffers: Tree) -> Iterator[None]:
        """One call with the leaves ``given``, of which ``params`` must not be written."""
        fixed = {name: _mark(given[name]) for name in given if name not in buffers}
        copies = {name: (given[name], _mark(given[name])) for name in buffers if given[name].is_floating_point()}
        before = _numbers(self.module)
        yield
        for name in params:
            if _mark(params[name]) != fixed[name]:
                raise SpecError(
                    f"the model changes its parameter '{name}' while it is called, outside of the gradient: the change "
                    "would reach other clients. Compute with a changed copy instead, and leave the parameter as it is"
                )
        self.buffers |= any(given[name] is not copy or _mark(copy) != mark for name, (copy, mark) in copies.items())
        changed = {name for name, value in _numbers(self.module).items() if before.get(name) != value}
        self._counting = changed if self._counting is None else self._counting & changed

    def tell(self, remembers: bool) -> None:
        """Warn about numbers that changed in every call and, if there are none, about a model that ``remembers`` its
        calls in another way."""
        for name in sorted(self._counting or ()):
            warnings.warn(
                f"the model changes its attribute '{name}' in every training call: all clients share it, and a resumed "
                "run begins it again, so that results depend on the engine. Keep such a number in a buffer that its "
                "class lists in 'exchanged_buffers'",
                RuntimeWarning,
                stacklevel=2,
            )
        if remembers and not self._counting:
            warnings.warn(
                "the model gives other outputs when it is called again with the same inputs: it keeps something "
                "between calls, such as a hidden state in an attribute, which all clients share, so that results "
                "depend on the engine. Compute every call from its inputs alone",
                RuntimeWarning,
                stacklevel=2,
            )


def refuse_renorm(module: nn.Module) -> None:
    """Refuse embeddings that change their weights when they are called."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise SpecError(
                f"'{name}' is an {type(part).__name__} with max_norm, which changes its weights when it is called, "
                "outside of the gradient: the change would reach other clients. Limit the norm of what it returns "
                "instead (torch.renorm)"
            )


def tracks_rows(part: nn.Module) -> bool:
    """Whether a layer that treats rows one by one keeps statistics of all of them, or counts their tokens."""
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return part.scale_grad_by_freq
    return isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats and part.training


def _mark(leaf: Tensor) -> _Mark:
    """What changes if a tensor is written, or gets other memory."""
    return leaf._version, leaf.data_ptr()


def _numbers(module: nn.Module) -> dict[str, float]:
    """The plain numbers among the attributes of all layers."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, int | float) and not key.startswith("_")
    }
