"""A pure function of tensors as a graph of torch's own operations: without repeated work, counted, compiled on request.

A local step is traced once through its gradients. What it computes twice (the spectral norm of a head that is called
twice, say) is computed once, and one compiler call sees the whole step, with its backward pass and its optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedalloy.engines.kernels.filling import fill

Values = dict[str, Any]


@dataclass
class TracedStep:
    """``advance`` overwrites some of the values of a step by new ones. ``targets[i]`` is the place of output i among
    the leaves of all values; values that the step does not change are not written."""

    graph: fx.GraphModule
    targets: list[int]
    call: Callable[..., Any]

    def advance(self, leaves: list[Tensor]) -> None:
        """One step on the leaves of the values, in the order of ``tree_flatten``."""
        fill([leaves[target] for target in self.targets], list(self.call(*leaves)))

    def compiled(self) -> TracedStep:
        """The same step, compiled when it is first called. New values are returned and then written: a compiled graph
        that writes them itself lost the write to a scalar."""
        return TracedStep(self.graph, self.targets, torch.compile(self.graph, dynamic=False, fullgraph=True))

    def flops(self, leaves: list[Tensor]) -> int:
        """The floating-point operations of products and convolutions; nothing is computed."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, FlopCounterMode(display=False) as counter:
            self.graph(*(mode.from_tensor(leaf) for leaf in leaves))
        return int(counter.get_total_flops())


def trace(step: Callable[[Values], Values], values: Values) -> TracedStep:
    """The graph of a pure ``step`` from values to new ones for some of their names. Tracing has no values, so a step
    that reads one fails here."""
    leaves, structure = tree_flatten(values)
    places = _places(values)
    written: list[str] = []

    def flat(*given: Tensor) -> list[Tensor]:
        new = step(tree_unflatten(list(given), structure))
        written[:] = list(new)
        # Dicts may come back in another order: every leaf is put where the old one was.
        return [leaf for name in new for leaf in tree_flatten(values[name])[1].flatten_up_to(new[name])]

    graph = _graph_of(flat, leaves)
    targets = _without_unchanged(graph.graph, [place for name in written for place in places[name]])
    graph.recompile()
    return TracedStep(graph, targets, graph)


def can_compile(device: torch.device) -> bool:
    """Whether steps on this device can be compiled: a GPU, and Triton, which comes with torch's CUDA builds."""
    return device.type == "cuda" and find_spec("triton") is not None


def or_uncompiled(step: TracedStep, leaves: list[Tensor]) -> TracedStep:
    """The step compiled, if that is possible and does with these values what the step does uncompiled; else as it is,
    after a warning. The values are not changed."""
    compiled = step.compiled()
    try:
        expected, found = _tried(step, leaves), _tried(compiled, leaves)
        if not alike([leaves[target] for target in step.targets], found, expected):
            raise ValueError("the compiled step computes something else than the step")
    except Exception as error:  # the compiler has errors of many classes
        warn_uncompiled(error)
        return step
    return compiled


def _tried(step: TracedStep, leaves: list[Tensor]) -> list[Tensor]:
    """The new values of a step on copies of what it changes."""
    own = list(leaves)
    for target in step.targets:
        own[target] = leaves[target].clone()
    step.advance(own)
    return [own[target] for target in step.targets]


def alike(before: list[Tensor], found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether two results of a step differ by much less than the step changes: a fifth, since rounding to bf16 in other
    places makes a difference of some hundredths.

    >>> old, new = [torch.zeros(2)], [torch.ones(2)]
    >>> alike(old, [torch.full((2,), 1.01)], new), alike(old, old, new), alike(old, new, old)
    (True, False, False)
    """
    change = apart = size = 0.0
    for old, one, other in zip(before, found, expected, strict=True):
        if other.is_floating_point():
            old, one, other = (leaf.double().nan_to_num() for leaf in (old, one, other))
            change += float((other - old).square().sum())
            apart, size = apart + float((one - other).square().sum()), size + float(other.square().sum())
    return apart <= 0.04 * change + 1e-12 * size


def warn_uncompiled(error: Exception) -> None:
    """Say that the compiler failed, and why: its first line, and the last ones, which name the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ... ".join(dict.fromkeys([lines[0], *lines[-3:]]))
    warnings.warn(f"local steps run uncompiled, which is slower: {reason[:600]}", RuntimeWarning, stacklevel=3)


def _graph_of(function: Callable[..., Any], leaves: list[Tensor]) -> fx.GraphModule:
    """The operations of a function, each computed once. What tracing needs takes half a second to import."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    graph.graph = fx_graph_cse(graph.graph)
    graph.graph.eliminate_dead_code()
    _keep_counters(graph.graph)
    graph.recompile()
    return graph


def _keep_counters(graph: fx.Graph) -> None:
    """Keep the compiler from folding counters into index arithmetic: keyed draws multiply them by 64-bit numbers, and
    indices have 32 bits in Triton. An ``or`` with 0 is no arithmetic to it."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (
            torch.ops.aten.arange.default,
            torch.ops.aten.arange.start,
            torch.ops.aten.arange.start_step,
        ):
            if node.meta["val"].dtype != torch.int64:
                continue
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.aten.bitwise_or.Scalar, (node, 0))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)


@dataclass
class Fuser:
    """Calls functions of tensors, each compiled once per shape if ``compiled``. A function is a ``partial``: two that
    fix the same arguments of the same function compute the same, whichever model they belong to."""

    compiled: bool
    _made: dict[tuple[Any, ...], Callable[..., Tensor]] = field(default_factory=dict, repr=False)

    def __call__(self, function: partial[Tensor], *given: Tensor | None) -> Tensor:
        """``function(*given)``."""
        if not self.compiled:
            return function(*given)
        shapes = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in given)
        key = function.func, function.args, tuple(sorted(function.keywords.items())), shapes
        if key not in self._made:
            self._made[key] = _compiled(function, given)
        return self._made[key](*(one for one in given if one is not None))


def _compiled(function: Callable[..., Tensor], given: tuple[Tensor | None, ...]) -> Callable[..., Tensor]:
    """The function of those arguments that are given. Every graph is a new function for the compiler, which keeps only
    a few versions of one."""

    def call(*leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        return function(*(None if one is None else next(rest) for one in given))

    leaves = [one for one in given if one is not None]
    graph = _graph_of(call, leaves)
    return torch.compile(graph, dynamic=False, fullgraph=True)


def _places(values: Values) -> dict[str, range]:
    """Where the leaves of every name are among all leaves."""
    places, begin = {}, 0
    for name, tree in values.items():
        count = len(tree_flatten(tree)[0])
        places[name] = range(begin, begin + count)
        begin += count
    return places


def _without_unchanged(graph: fx.Graph, targets: list[int]) -> list[int]:
    """Remove the outputs that are the inputs at their own place; returns the places of the others."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    kept = [(node, target) for node, target in zip(output.args[0], targets, strict=True) if node is not inputs[target]]
    output.args = ([node for node, _ in kept],)
    return [target for _, target in kept]
