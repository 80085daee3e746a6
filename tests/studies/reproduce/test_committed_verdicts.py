"""Every verdict on the committed pages, worked out a second time from the rules: from the .json and .toml files alone,
with scipy, and without the code that judges."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
NAMES = sorted(file.stem for file in RESULTS.glob("*.json"))
SMALL = ("variance", "gini", "gap", "rounds", "objective", "cumulative_loss", "regret")
OF_CONTROLS = {"holds": "ahead of our control", "does not hold": "behind our control"}
BESIDE = {"holds": "ahead (not counted)", "does not hold": "behind (not counted)"}
Data = dict[str, Any]


def declared(name: str) -> Data:
    return tomllib.loads((ROOT / "recipes" / "claims" / f"{name}.toml").read_text())


def measured(name: str) -> Data:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str) -> dict[tuple[str, str, str], str]:
    """Claim, case and control to the verdict in the first column; claims that were not run have one line for all."""
    texts = sorted((claim["text"] for claim in declared(name)["claims"]), key=len, reverse=True)
    found = {}
    for line in (RESULTS / f"{name}.md").read_text().splitlines():
        if line.startswith("| **"):
            verdict, claim, case, *_ = line.removeprefix("| ").split(" | ")
            control = re.search(r", against `(.*)`$", claim)
            text = next(text for text in texts if claim.startswith(text))
            found[text, case, control[1] if control else ""] = verdict.strip("*")
    return found


def asked(experiment: Data, case: str) -> Data:
    protocol = dict(experiment["protocol"])
    return protocol | protocol.pop("cases", {}).get(case, {})


def recipe_rounds(experiment: Data, case: str) -> int | None:
    known = [one for one in experiment.get("cases", ()) if one["name"] == case]
    return tomllib.loads((ROOT / "recipes" / known[0]["recipe"]).read_text())["run"]["rounds"] if known else None


def as_published(experiment: Data, claim: Data, case: str, results: Data, runs: Sequence[Data]) -> bool:
    """Rounds, clients and cohort of every run, and no other setting."""
    wanted, slack = asked(experiment, case), claim.get("length_tolerance", 0.0)
    rounds = recipe_rounds(experiment, case) if wanted["rounds"] == "not stated" else wanted["rounds"]
    lengths = (("planned", rounds), ("clients", wanted["clients"]), ("cohort", wanted["cohort"]))
    for field, published in lengths:
        if isinstance(published, int) and any(abs(run[field] - published) > slack * published for run in runs):
            return False
    other = [path for path in results["settings"] if not path.startswith(("engine.", "run.seeds", "run.rounds"))]
    return not results["quick"] and not other and not any(run.get("changed") for run in runs)


def values(runs: Sequence[Data], score: str) -> dict[int, float]:
    """By seed. A run without a value has failed or never reached the target, which is worst."""
    if score.startswith("mix_") and not any(name.startswith("mix_") for run in runs for name in run["scores"]):
        score = "mean"  # a method with one model has no mixtures
    worst = math.inf if score.rpartition(":")[2].startswith(SMALL) else -math.inf
    if not any(score in run["scores"] for run in runs):
        return {}
    known = {run["seed"]: run["scores"].get(score) for run in runs if run["state"] in ("finished", "failed")}
    return {seed: worst if value is None else value for seed, value in known.items()}


def apart(mine: Sequence[Data], theirs: dict[int, float], score: str) -> list[float]:
    """One difference per seed; the mean over the seeds that used one table."""
    tables = {run["seed"]: run.get("table", str(run["seed"])) for run in mine}
    by_table: dict[str, list[float]] = {}
    for seed, value in values(mine, score).items():
        if seed in theirs:
            gap = 0.0 if value == theirs[seed] else value - theirs[seed]
            by_table.setdefault(tables[seed], []).append(gap)
    return [statistics.fmean(gaps) for gaps in by_table.values()]


def p_and_side(gaps: Sequence[float], reused: float) -> tuple[float, float]:
    """The two-sided p and the side: Student's t, corrected for shared examples, or signed ranks."""
    if len(gaps) < 3:
        return math.nan, 0.0
    finite = all(map(math.isfinite, gaps))
    if not finite or np.ptp(gaps) <= 1e-9 * max(map(abs, gaps)):
        if reused:
            return math.nan, 0.0
        some = [gap for gap in gaps if gap]
        ranks = np.sign(some) * stats.rankdata(np.abs(some)) if some else np.zeros(1)
        every = stats.permutation_test(
            (ranks,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", n_resamples=2**12, vectorized=True
        )
        return (float(every.pvalue), float(ranks.sum())) if some else (1.0, 0.0)
    error = statistics.stdev(gaps) * math.sqrt(1 / len(gaps) + reused)
    mean = statistics.fmean(gaps)
    return float(2 * stats.t.sf(abs(mean) / error, len(gaps) - 1)), mean


def half_width(gaps: Sequence[float], reused: float, alpha: float) -> float:
    error = statistics.stdev(gaps) * math.sqrt(1 / len(gaps) + reused)
    return float(stats.t.isf(alpha / 2, len(gaps) - 1)) * error


def holm(ps: Sequence[float]) -> list[bool]:
    order = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    rejected = [False] * len(ps)
    for rank, (p, place) in enumerate(order):
        if p > 0.05 / (len(order) - rank):
            break
        rejected[place] = True
    return rejected


def by_comparing(claim: Data, mine: Sequence[Data], sides: Sequence[dict[int, float]]) -> str:
    reused = 0.0 if claim["score"].endswith("global") else mine[0].get("reused", 0.0)
    gaps = [apart(mine, theirs, claim["score"]) for theirs in sides]
    if not any(gaps):
        return "not run"
    if claim["relation"] == "near":
        margin, known = claim["margin"], [one for one in gaps if len(one) >= 3]
        means = [(abs(statistics.fmean(one)), one) for one in known]
        if any(mean - half_width(one, reused, 0.05 / len(known)) > margin for mean, one in means):
            return "does not hold"
        inside = [mean + half_width(one, reused, 0.10) < margin for mean, one in means]
        return "holds" if len(inside) == len(gaps) and all(inside) else "undecided"
    sign = 1 if claim["relation"] == "above" else -1
    found = [p_and_side(one, reused) if one else (math.nan, 0.0) for one in gaps]
    if any(sure and sign * side < 0 for sure, (_, side) in zip(holm([p for p, _ in found]), found, strict=True)):
        return "does not hold"
    return "holds" if all(p <= 0.05 and sign * side > 0 for p, side in found) else "undecided"


def by_counting(claim: Data, mine: Sequence[Data]) -> str:
    if claim["relation"] == "bounded":
        held = [run["scores"][claim["score"]] <= run["scores"][claim["than"]] for run in mine]
        verdict = "holds" if all(held) else "does not hold"
    else:
        level = claim.get("value", -math.inf)
        failed = [run["state"] == "failed" or run["scores"][claim["score"]] < level for run in mine]
        verdict = "holds" if all(failed) else "undecided" if any(failed) else "does not hold"
    return verdict if len(mine) >= 3 else "undecided"


def verdict_of(experiment: Data, results: Data, claim: Data, case: str, control: str = "") -> str:
    others = [control] if control else claim.get("others", [])
    cells = {name: [run for run in results["runs"] if (run["case"], run["method"]) == (case, name)]
             for name in (claim["method"], *others)}  # fmt: skip
    mine = cells[claim["method"]]
    if not mine:
        return "not run"
    if claim["relation"] in ("fails", "bounded"):
        found = by_counting(claim, mine)
    elif "value" in claim:
        found = by_comparing(claim, mine, [{run["seed"]: float(claim["value"]) for run in mine}])
    elif "than" in claim:
        found = by_comparing(claim, mine, [values(mine, claim["than"])])
    else:
        found = by_comparing(claim, mine, [values(cells[name], claim["score"]) for name in others])
    whole = as_published(experiment, claim, case, results, [run for runs in cells.values() for run in runs])
    return found if found == "not run" or whole else "preliminary"


def every_verdict(name: str, results: Data) -> dict[tuple[str, str, str], str]:
    experiment, found = declared(name), {}
    for claim in experiment["claims"]:
        for case in claim["cases"]:
            controls = claim.get("controls", [])
            for control in [*([""] if claim.get("others") or not controls else []), *controls]:
                found[claim["text"], case, control] = verdict_of(experiment, results, claim, case, control)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_verdict_follows_from_the_rules(name):
    rows, expected = rows_of(name), every_verdict(name, measured(name))
    beside = {claim["text"] for claim in declared(name)["claims"] if claim.get("beside")}
    for (text, case, control), verdict in expected.items():
        if verdict == "not run":
            assert (text, case, control) not in rows or rows[text, case, control].startswith("not run")
            continue
        said = OF_CONTROLS.get(verdict, f"{verdict} (our control)") if control else verdict
        if text in beside and not control:
            said = BESIDE.get(verdict, f"{verdict} (not counted)")
        assert rows[text, case, control] == said, (text, case, control)


@pytest.mark.parametrize("name", NAMES)
def test_shorter_runs_and_two_seeds_would_decide_nothing(name):
    """The checks can fail: the same results, shortened by a round, or with two seeds, give no verdict at all."""
    results = measured(name)
    short = {**results, "runs": [{**run, "planned": run["planned"] - 1} for run in results["runs"]]}
    assert not {"holds", "does not hold"} & set(every_verdict(name, short).values())
    two = sorted({run["seed"] for run in results["runs"]})[:2]
    few = {**results, "runs": [run for run in results["runs"] if run["seed"] in two]}
    assert not {"holds", "does not hold"} & set(every_verdict(name, few).values())


def test_the_index_counts_what_the_pages_say():
    index = (RESULTS / "index.md").read_text()
    told: Counter[str] = Counter()
    for line in index.splitlines():
        if re.match(r"\| [a-z ]+ \d+(,| \|)", line):
            for part in line.removeprefix("| ").partition(" |")[0].split(", "):
                word, _, number = part.rpartition(" ")
                told[word] += int(number)
    counted: Counter[str] = Counter()
    for name in NAMES:
        beside = {claim["text"] for claim in declared(name)["claims"] if claim.get("beside")}
        found = every_verdict(name, measured(name)).items()
        counted += Counter(verdict for (text, _, control), verdict in found if not control and text not in beside)
    for verdict in ("holds", "does not hold", "undecided"):
        assert told[verdict] == counted[verdict] > 0
    assert len(index.splitlines()) < 80, "a short page"
    assert not re.search(r"\bS[0-4]\b", index)
