"""The sentence about a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedalloy.results.conclusion import conclusion, notes
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn

BASE = (0.80, 0.82, 0.79, 0.81, 0.80, 0.83, 0.78, 0.80, 0.81)


def runs(**scores: tuple[float, ...]) -> list[RunOutcome]:
    return [
        RunOutcome(name, seed, "finished", rounds=10, scores={"mean": one})
        for name, values in scores.items()
        for seed, one in enumerate(values)
    ]


def up(by: float, seeds: int, spread: float = 0.001) -> tuple[float, ...]:
    return tuple(one + by + spread * (-1) ** place for place, one in enumerate(BASE[:seeds]))


def test_who_beats_the_first_and_who_is_worse():
    found = conclusion(runs(avg=BASE[:4], a=up(0.1, 4), b=up(-0.1, 4), c=up(0.05, 4)))
    assert found == "a and c beat avg in accuracy at 95 % over 4 seeds; b is worse."


def test_for_a_loss_lower_is_better():
    lower = [replace(run, metric="loss", higher_is_better=False) for run in runs(avg=BASE[:4], a=up(0.1, 4))]
    assert conclusion(lower) == "No method beats avg in loss at 95 % over 4 seeds; a is worse."


def test_a_metric_without_a_direction_only_differs():
    counts = [replace(run, metric="n", higher_is_better=None) for run in runs(avg=BASE[:4], a=up(0.1, 4))]
    assert conclusion(counts) == "a has a higher n than avg at 95 % over 4 seeds."
    same = [replace(run, metric="n", higher_is_better=None) for run in runs(avg=BASE[:4], a=up(0.0, 4, 0.01))]
    assert conclusion(same).startswith("No method differs from avg in n at 95 % over 4 seeds.")


def test_how_many_more_seeds_would_decide():
    found = conclusion(runs(avg=BASE[:4], a=(0.81, 0.83, 0.79, 0.84), b=up(0.0, 4, 0.01)))
    assert found.startswith("No method beats avg in accuracy at 95 % over 4 seeds. About ")
    assert "more seeds would decide a" in found
    assert " b." not in found, "not even with a hundred"
    never = conclusion(runs(avg=BASE[:4], b=up(0.0, 4, 0.01)))
    assert never.endswith("More seeds (up to 100) would not decide b.")


def test_a_method_that_equals_the_first_is_said_to():
    found = runs(avg=BASE[:4], a=BASE[:4], b=up(0.0, 4, 0.01))
    assert conclusion(found).endswith("More seeds (up to 100) would not decide b. a equals avg in every run.")
    lost = [replace(run, state="failed") if (run.name, run.seed) == ("a", 0) else run for run in found]
    assert "equal" not in conclusion(lost)


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed"), (2, "2 seeds")])
def test_too_few_seeds_give_no_verdict(seeds, said):
    assert conclusion(runs(avg=BASE[:seeds], a=up(0.1, seeds))) == f"No verdict over {said}: one needs at least 3."


def test_runs_that_failed_or_did_not_finish_are_said():
    done = runs(avg=BASE[:5], a=up(0.1, 5))
    failed = [replace(run, state="failed") if (run.name, run.seed) == ("a", 0) else run for run in done]
    said = "Failed, which is worse than any result: 1 of 5 runs of a."
    assert conclusion(failed).startswith("No method beats avg in accuracy at 95 % over 5 seeds. ")
    assert conclusion(failed).endswith(said)
    assert conclusion([replace(run, metric="n", higher_is_better=None) for run in failed]).endswith(said)
    waiting = [replace(run, state="interrupted") if run.seed == 4 else run for run in done]
    assert conclusion(waiting) == "No verdict yet: 2 runs of 10 did not finish."
    lost = [replace(run, state="failed") if run.name == "avg" else run for run in done]
    assert conclusion(lost).startswith("No verdict: no run of avg")
    assert conclusion([replace(run, state="failed") if run.name == "a" else run for run in done]).endswith(
        "Failed, which is worse than any result: 5 of 5 runs of a."
    )


def test_there_must_be_something_to_compare():
    assert conclusion([]) == "No runs."
    assert conclusion(runs(avg=BASE)).startswith("No verdict: there is one algorithm")
    assert conclusion([replace(run, quick=True) for run in runs(avg=BASE, a=up(0.1, 9))]).endswith("(--quick).")


def test_runs_of_different_lengths_are_said():
    found = [replace(run, rounds=4) if run.name == "a" else run for run in runs(avg=BASE[:4], a=up(0.1, 4))]
    assert "Not all are equally long: avg 10 rounds, a 4 rounds." in notes(found)
    assert not any("long" in note for note in notes(runs(avg=BASE[:4], a=up(0.1, 4))))


def with_rounds(found: list[RunOutcome], **rounds: list[int | None]) -> list[RunOutcome]:
    return [replace(run, target=0.8, reached=rounds[run.name][run.seed]) for run in found]


def test_rounds_to_the_target_are_decided_with_an_interval():
    found = with_rounds(runs(avg=BASE[:5], a=up(0.0, 5, 0.01)), avg=[12, 14, 13, 15, 12], a=[9, 11, 9, 12, 10])
    assert "; a needs 3 rounds fewer to reach 0.8 (1.82 to 4.18)" in conclusion(found)


def test_runs_that_end_at_the_target_are_compared_by_rounds_alone():
    """Their scores are those of the round in which each reached the target."""
    plain = with_rounds(runs(avg=BASE[:5], a=up(0.1, 5)), avg=[12, 14, 13, 15, 12], a=[9, 11, 9, 12, 10])
    ending = [replace(run, ends_at_target=True) for run in plain]
    assert conclusion(plain).startswith("a beats avg in accuracy")
    assert conclusion(ending).startswith("a needs 3 rounds fewer to reach 0.8 (2.05 to 3.95) at 95 % over 5 seeds.")
    alike = [replace(run, reached=run.reached and 12 + (-1) ** run.seed * (run.name == "a")) for run in ending]
    assert conclusion(alike).startswith("No method reaches the target sooner than avg at 95 % over 5 seeds. ")
    assert conclusion([run for run in ending if run.seed < 2]) == "No verdict over 2 seeds: one needs at least 3."


def test_failures_count_against_a_method_and_decide_with_enough_seeds():
    done = runs(avg=BASE, a=up(0.1, 9))
    some = [replace(run, state="failed") if run.name == "a" and run.seed < 8 else run for run in done]
    assert conclusion(some).startswith("No method beats avg in accuracy at 95 % over 9 seeds; a is worse.")
    both = [replace(run, state="failed") if run.seed < 3 else run for run in done]
    assert conclusion(both).startswith("a beats avg in accuracy at 95 % over 6 seeds."), "two that failed say nothing"


def test_a_target_that_is_never_reached_is_decided_by_ranks_alone():
    few = with_rounds(runs(avg=BASE[:4], a=up(0.0, 4, 0.01)), avg=[None] * 4, a=[3, 4, 5, 3])
    assert "reach" not in conclusion(few)
    many = with_rounds(runs(avg=BASE, a=up(0.0, 9, 0.01)), avg=[None] * 9, a=[3, 4, 5, 3, 3, 4, 4, 5, 6])
    assert "; a reaches 0.8 sooner (avg did not reach it with 9 of 9 seeds)" in conclusion(many)
    other = with_rounds(runs(avg=BASE, a=up(0.0, 9, 0.01)), a=[None] * 9, avg=[3, 4, 5, 3, 3, 4, 4, 5, 6])
    assert "; a reaches 0.8 later (a did not reach it with 9 of 9 seeds)" in conclusion(other)
    some = with_rounds(
        runs(avg=BASE, a=up(0.0, 9, 0.01)), avg=[8, None, 9, 9, 8, 9, 8, 9, None], a=[3, 4, 5, 3, 3, 4, 4, 5, 6]
    )
    assert "; a needs 5 rounds fewer to reach 0.8 (at least 4)" in conclusion(some)
    assert any("ranks decide and the median is shown" in note for note in notes(some))


def drawn(seed: int, examples: str, rows: str, reused: float) -> Drawn:
    return Drawn(seed, f"partition {seed}", examples, rows, reused, ("the initial model", "the order of batches"))


def test_what_a_seed_redraws_is_said_and_shared_examples_are_corrected():
    found = runs(avg=BASE[:4], a=(0.81, 0.84, 0.81, 0.84))

    def said(**more):
        return notes([replace(run, drawn=more["each"](run.seed)) for run in found])

    split = said(each=lambda seed: drawn(seed, "same", f"rows {seed}", 0.25))
    assert split[-1].startswith(
        "A seed redraws the initial model, the order of batches, which client has which examples"
    )
    assert "Nadeau and Bengio (2003), with 0.25 test examples" in split[-1]
    given = said(each=lambda seed: drawn(seed, "same", "same", 0.25))
    assert given[-1].endswith("the order of batches and which client has which examples.")
    fresh = said(each=lambda seed: drawn(seed, f"labels {seed}", f"rows {seed}", 0.25))
    assert fresh[-1].endswith("the order of batches and the examples themselves.")
    common = said(each=lambda seed: drawn(seed, "same", f"rows {seed}", 0.0))
    assert "Nadeau" not in common[-1]
    corrected = [replace(run, drawn=drawn(run.seed, "same", f"rows {run.seed}", 0.25)) for run in found]
    assert "which split the same examples again" in conclusion(corrected) or "About" in conclusion(corrected)
    assert conclusion(corrected) != conclusion(found)


def test_decided_rounds_and_open_means_do_not_contradict_each_other():
    means, rounds = (0.90, 0.91, 0.92, 0.93), {"a": (12, 13, 12, 13), "b": (9, 10, 9, 9)}
    runs = [
        RunOutcome(name, seed, "finished", scores={"mean": means[seed]}, target=0.8, reached=reached)
        for name, found in rounds.items()
        for seed, reached in enumerate(found)
    ]
    said = conclusion(runs)
    assert "b needs 3.25 rounds fewer" in said
    assert said.endswith("b equals a in accuracy in every run.")


def test_seeds_of_a_method_without_a_verdict_are_not_counted():
    scores = {"a": (0.90, 0.91, 0.92, 0.93), "b": (0.95, 0.97, 0.97, 0.98), "c": (0.90, 0.99)}
    runs = [
        RunOutcome(name, seed, "finished", scores={"mean": one})
        for name in scores
        for seed, one in enumerate(scores[name])
    ]
    assert "over 4 seeds" in conclusion(runs)
