"""``fedalloy unseen``: how a run's model performs on clients that never took part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.console import number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Json


def unseen(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    steps: Annotated[str, typer.Option(help="Numbers of local steps.", metavar="N,N,...")] = "0,1,5,10",
    clients: Annotated[
        str, typer.Option(help="Ids to score instead of those the recipe sets aside.", metavar="ID,ID,...")
    ] = "",
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Score clients that never took part: with the global model, and after a few local steps.

    A recipe sets clients aside with newcomers = N in [partition].
    """
    import torch

    from fedalloy.experiment.recipe import reopen
    from fedalloy.experiment.unseen import evaluate_unseen

    trained = reopen(run)
    ids = torch.tensor(_numbers(clients, "--clients")) if clients else None
    found = evaluate_unseen(trained, ids, _numbers(steps, "--steps"))
    if as_json:
        print_json(found.to_json())
        return
    metric = trained.fed.config.target_metric or trained.fed.config.metrics[0]
    summaries = {count: found.summary(count)[metric] for count in found.scores}
    rows = [
        [str(count), *(number(one.get(name)) for name in ("mean", "worst_served", "best_served"))]
        for count, one in summaries.items()
    ]
    title = f"{len(found.ids)} unseen clients after round {trained.round}"
    print_table(["local steps", f"{metric} (mean)", "worst 10 %", "best 10 %"], rows, title, range(4))


def _numbers(text: str, option: str) -> list[int]:
    """The whole numbers of a list with commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"'{text}' is not a list of whole numbers; write for example 0,1,5", param_hint=option)
    return list(map(int, words))
