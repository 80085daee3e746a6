"""The rules, each importable by its class name: ``from fedalloy.methods import AaggffD, Momentum, Prox``.

Four kinds: what a client does (``solvers``), how much its contribution counts (``weightings``), how the server moves
(``servers``), what happens to messages (``wires``). ``published`` has the methods of papers, composed of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedalloy.core import registry
from fedalloy.core.errors import nearest

if TYPE_CHECKING:  # so that editors and type checkers know the arguments of every rule, and misspelt names
    from fedalloy.methods.servers.adaptive import Adagrad as Adagrad
    from fedalloy.methods.servers.adaptive import Adam as Adam
    from fedalloy.methods.servers.adaptive import Yogi as Yogi
    from fedalloy.methods.servers.amsgrad import AmsGrad as AmsGrad
    from fedalloy.methods.servers.langevin import Langevin as Langevin
    from fedalloy.methods.servers.momentum import Momentum as Momentum
    from fedalloy.methods.servers.period_momentum import PeriodMomentum as PeriodMomentum
    from fedalloy.methods.servers.sgd import ServerSgd as ServerSgd
    from fedalloy.methods.solvers.apfl import Apfl as Apfl
    from fedalloy.methods.solvers.cgan import Cgan as Cgan
    from fedalloy.methods.solvers.cvae import Cvae as Cvae
    from fedalloy.methods.solvers.ditto import Ditto as Ditto
    from fedalloy.methods.solvers.energy import Energy as Energy
    from fedalloy.methods.solvers.finetune import FineTune as FineTune
    from fedalloy.methods.solvers.personal import Personal as Personal
    from fedalloy.methods.solvers.pfedme import PFedMe as PFedMe
    from fedalloy.methods.solvers.propfair import PropFair as PropFair
    from fedalloy.methods.solvers.prox import Prox as Prox
    from fedalloy.methods.solvers.scaffold import Scaffold as Scaffold
    from fedalloy.methods.solvers.sgd import Sgd as Sgd
    from fedalloy.methods.solvers.superfed import SuPerFed as SuPerFed
    from fedalloy.methods.weightings.aaggff_d import AaggffD as AaggffD
    from fedalloy.methods.weightings.aaggff_s import AaggffS as AaggffS
    from fedalloy.methods.weightings.afl import Afl as Afl
    from fedalloy.methods.weightings.boosting import Boosting as Boosting
    from fedalloy.methods.weightings.energies import Energies as Energies
    from fedalloy.methods.weightings.ewwa import Ewwa as Ewwa
    from fedalloy.methods.weightings.fedadp import Angles as Angles
    from fedalloy.methods.weightings.fedfa import Information as Information
    from fedalloy.methods.weightings.krum import Krum as Krum
    from fedalloy.methods.weightings.krum import MultiKrum as MultiKrum
    from fedalloy.methods.weightings.mgda import FedMgda as FedMgda
    from fedalloy.methods.weightings.mirror import Mirror as Mirror
    from fedalloy.methods.weightings.nova import Nova as Nova
    from fedalloy.methods.weightings.qfedavg import QFedAvg as QFedAvg
    from fedalloy.methods.weightings.robust import Median as Median
    from fedalloy.methods.weightings.robust import TrimmedMean as TrimmedMean
    from fedalloy.methods.weightings.samples import Samples as Samples
    from fedalloy.methods.weightings.unfolded import Unfolded as Unfolded
    from fedalloy.methods.weightings.uniform import Uniform as Uniform
    from fedalloy.methods.wires.clip import Clip as Clip
    from fedalloy.methods.wires.noise import Noise as Noise
    from fedalloy.methods.wires.scaled_sign import ScaledSign as ScaledSign
    from fedalloy.methods.wires.topk import TopK as TopK
else:

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(_by_class_name())
        if not name[:1].isupper():  # maybe a submodule: Python's import looks for it after this error
            raise AttributeError(f"module 'fedalloy.methods' has no attribute '{name}'")
        rules = _by_class_name()
        if name not in rules:
            raise AttributeError(f"fedalloy.methods has no rule '{name}': {nearest(name, rules)}")
        return rules[name]


_KINDS = ("solver", "weighting", "server", "wire")


def __dir__() -> list[str]:
    return sorted({*_by_class_name(), "published", "servers", "solvers", "weightings", "wires"})


def _by_class_name() -> dict[str, Any]:
    rules = (rule for kind in _KINDS for rule in registry.everything(kind).values())
    return {rule.__name__: rule for rule in rules if isinstance(rule, type)}
