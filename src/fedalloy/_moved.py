"""Moved modules: imports by old names work for one version, with a DeprecationWarning that has the new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# The first matching prefix is used, so longer ones come first.
MOVED = {
    "fedalloy.cli.newcomers": "fedalloy.cli.unseen",
    "fedalloy.conform.vectors": "fedalloy.testing.vectors.files",
    "fedalloy.conform": "fedalloy.testing.vectors",
    "fedalloy.core.around": "fedalloy.core.wrappers",
    "fedalloy.core.roles": "fedalloy.core.capabilities",
    "fedalloy.docs": "fedalloy.cli.docs",
    "fedalloy.engines.chain": "fedalloy.engines.kernels.layer_chain",
    "fedalloy.engines.exchange": "fedalloy.engines.shared_memory",
    "fedalloy.engines.flower": "fedalloy.flower.engine",
    "fedalloy.engines.fused_mixture": "fedalloy.engines.kernels.fused_interpolated",
    "fedalloy.engines.graphs": "fedalloy.engines.kernels.cuda_graphs",
    "fedalloy.engines.inplace": "fedalloy.engines.kernels.inplace_sgd",
    "fedalloy.engines.mapped": "fedalloy.engines.kernels.vmap_kernel",
    "fedalloy.experiment.newcomers": "fedalloy.experiment.unseen",
    "fedalloy.export": "fedalloy.results.export",
    "fedalloy.flower.protocol.letters": "fedalloy.flower.protocol.tensor_messages",
    "fedalloy.flower.scaffold": "fedalloy.flower.project_templates",
    "fedalloy.methods.weightings.angles": "fedalloy.methods.weightings.fedadp",
    "fedalloy.methods.weightings.information": "fedalloy.methods.weightings.fedfa",
    "fedalloy.methods.weightings.middle": "fedalloy.methods.weightings.robust",
    "fedalloy.methods.weightings.moments": "fedalloy.methods.weightings.ewwa",
    "fedalloy.recipe": "fedalloy.experiment.recipe",
    "fedalloy.records": "fedalloy.experiment.records",
    "fedalloy.report.folio": "fedalloy.report.context",
    "fedalloy.reproduce": "fedalloy.studies.reproduce",
    "fedalloy.results.stories": "fedalloy.results.summaries",
    "fedalloy.run.newcomers": "fedalloy.experiment.unseen",
    "fedalloy.run": "fedalloy.experiment",
    "fedalloy.serve": "fedalloy.report.live",
    "fedalloy.servers": "fedalloy.methods.servers",
    "fedalloy.solvers": "fedalloy.methods.solvers",
    "fedalloy.studies.unfolding.course": "fedalloy.studies.unfolding.unrolled",
    "fedalloy.studies.unfolding.still": "fedalloy.studies.unfolding.fixed_model",
    "fedalloy.synthetic.classifier": "fedalloy.methods.classifier",
    "fedalloy.synthetic.methods": "fedalloy.methods.generative",
    "fedalloy.synthetic.snapshots": "fedalloy.experiment.records.snapshots",
    "fedalloy.synthetic": "fedalloy.studies.synthetic",
    "fedalloy.tasks.models.roles": "fedalloy.tasks.models.capabilities",
    "fedalloy.track.tracked": "fedalloy.experiment.tracking",
    "fedalloy.track.tracker": "fedalloy.experiment.tracking",
    "fedalloy.track": "fedalloy.results.track",
    "fedalloy.unfolding.algorithms": "fedalloy.methods.unfolded",
    "fedalloy.unfolding.course": "fedalloy.studies.unfolding.unrolled",
    "fedalloy.unfolding.still": "fedalloy.studies.unfolding.fixed_model",
    "fedalloy.unfolding.table": "fedalloy.methods.weightings.weight_table",
    "fedalloy.unfolding": "fedalloy.studies.unfolding",
    "fedalloy.weightings.angles": "fedalloy.methods.weightings.fedadp",
    "fedalloy.weightings.information": "fedalloy.methods.weightings.fedfa",
    "fedalloy.weightings.middle": "fedalloy.methods.weightings.robust",
    "fedalloy.weightings.moments": "fedalloy.methods.weightings.ewwa",
    "fedalloy.weightings": "fedalloy.methods.weightings",
    "fedalloy.wire": "fedalloy.methods.wires",
}
_KERNELS = """between_products client_graphs conv_chain conv_graphs conv_sgd cuda_graphs filling fused fused_graph
fused_interpolated im2col inplace_sgd layer_chain tracing vmap_kernel"""
MOVED |= {f"fedalloy.engines.{name}": f"fedalloy.engines.kernels.{name}" for name in _KERNELS.split()}


class OldNames:
    """Finds and loads modules by their old names: what is loaded is the module of the new name, not a copy."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec for a module that moved and is there; nothing for any other."""
        new = new_name(name)
        there = find_spec(new) if new else None
        return ModuleSpec(name, _LOADER, is_package=there.submodule_search_locations is not None) if there else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """The module of the new name, with a DeprecationWarning."""
        new = str(new_name(spec.name))
        warnings.warn(f"{spec.name} is now {new}; the old name goes with the next version", DeprecationWarning, 2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def get_code(name: str) -> Any:
        """What ``python -m`` runs."""
        spec: Any = find_spec(str(new_name(name)))
        return spec.loader.get_code(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """It has run already; Python has just given it the old name's spec."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state


_LOADER: Any = OldNames


def new_name(name: str) -> str | None:
    """Where a module is now.

    >>> new_name("fedalloy.solvers.sgd"), new_name("fedalloy.core.tree")
    ('fedalloy.methods.solvers.sgd', None)
    """
    for old, new in MOVED.items():
        if name == old or name.startswith(old + "."):
            return new + name.removeprefix(old)
    return None


def install() -> None:
    """Have Python look here first: below an old name it would find the files of the new one, and load them again."""
    if OldNames not in sys.meta_path:
        sys.meta_path.insert(0, OldNames)
