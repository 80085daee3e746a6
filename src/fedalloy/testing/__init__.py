"""The conformance suite, for authors of new rules and engines.

``check_rule("weighting", MyRule())`` and ``check_engine(MyEngine())`` return a list of problems; an empty
list is a pass. ``conformance_table()`` has a row for every registered rule and check: parametrise a test over it,
and new rules are covered automatically. Everything runs on small float64 problems made from a key.
"""

from fedalloy.testing.cases import EngineCase, crossed_case, engine_cases, plain_case, work
from fedalloy.testing.engines import Problem, check_engine
from fedalloy.testing.faults import (
    FAULTS,
    HANDLE_FAULTS,
    forgotten_mask,
    key_by_slot,
    lost_client_state,
    shuffled_clients,
)
from fedalloy.testing.problems import SmallTask, small_objective, small_task
from fedalloy.testing.rules import Row, check_rule, conformance_table, run_row, specimen
from fedalloy.testing.toys import HalfWithMemory, Jitter, Lopsided, Wavering

__all__ = [
    "FAULTS",
    "HANDLE_FAULTS",
    "EngineCase",
    "HalfWithMemory",
    "Jitter",
    "Lopsided",
    "Problem",
    "Row",
    "SmallTask",
    "Wavering",
    "check_engine",
    "check_rule",
    "conformance_table",
    "crossed_case",
    "engine_cases",
    "forgotten_mask",
    "key_by_slot",
    "lost_client_state",
    "plain_case",
    "run_row",
    "shuffled_clients",
    "small_objective",
    "small_task",
    "specimen",
    "work",
]
