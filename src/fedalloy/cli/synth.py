"""``fedalloy synth``: the data that a run of a generative method has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedalloy.cli.console import number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Json

if TYPE_CHECKING:
    from fedalloy.studies.synthetic.quality import Quality

app = typer.Typer(
    no_args_is_help=True,
    help="Synthetic data of a run (fedevg, fedcgan, fedcvae): export, evaluate and draw it.",
    epilog="Begin with: fedalloy run recipes/digits-cvae.toml -o RUN, then fedalloy synth export RUN -o samples",
)
Run = Annotated[Path, typer.Argument(help="A run folder; the run may still be running.", metavar="RUN")]
PerClass = Annotated[
    int, typer.Option("--per-class", min=1, help="Examples per class; fedevg always returns all it has learned.")
]


@app.command()
def export(
    run: Run,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.", metavar="DIR")],
    per_class: PerClass = 10,
    round: Annotated[int | None, typer.Option(help="A round whose samples were kept; default: the latest.")] = None,
    allow_imports: AllowImports = False,
) -> None:
    """Write a run's synthetic examples: samples.npz (arrays x, y, bounds) and a preview.

    The preview is grid.png (one row per class) for pictures, samples.csv for rows of a table.
    Values are on the scale of the training data: a table standardised by client stays standardised. Read with
    numpy.load("DIR/samples.npz").
    """
    from fedalloy.experiment.recipe import reopen
    from fedalloy.experiment.records import snapshots
    from fedalloy.studies.synthetic.export import export as write
    from fedalloy.studies.synthetic.quality import samples_of

    trained = reopen(run)
    x, y = samples_of(trained, per_class) if round is None else snapshots.load(run, round)
    for path in write(x, y, output, trained.fed.task.bounds):
        typer.echo(str(path))


@app.command()
def quality(
    run: Run,
    per_class: PerClass = 10,
    inception: Annotated[
        Path | None,
        typer.Option(help="A TorchScript file: pictures [N, 3, 299, 299] in [0, 1] to features.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Compare a run's synthetic examples with its real ones, which must be available: quality, use, privacy and cost.

    Frechet distance to the whole test set, at one scale, in the features of a classifier that is trained on real data
    for this (with --inception: of that network), and the same distance for equally many real examples. Accuracy on real
    test data after training on synthetic examples, and after training on equally many real ones. Distances to the
    nearest training and held-out example, and how well they reveal membership: 0.5 is chance. Bytes sent and received.
    """
    from fedalloy.experiment.recipe import reopen
    from fedalloy.studies.synthetic.features import features_of_file
    from fedalloy.studies.synthetic.quality import quality as judge
    from fedalloy.studies.synthetic.quality import real_data, samples_of

    trained = reopen(run)
    features = None if inception is None else features_of_file(inception, real_data(trained).bounds)
    found = judge(trained, *samples_of(trained, per_class), features)
    if as_json:
        print_json(found.to_json())
        return
    print_table(["what", "value", "reference"], _rows(found), f"{found.count} examples after round {found.round}", [1])
    typer.echo(f"Features: {found.features}. Compare distances only between equal numbers of examples.")


@app.command()
def grid(
    run: Run,
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture.", metavar="PNG")] = Path("grid.png"),
    rounds: Annotated[int, typer.Option(min=1, help="Draw at most this many of the rounds.")] = 10,
    allow_imports: AllowImports = False,
) -> None:
    """Draw one example of every class over rounds: classes downwards, rounds to the right.

    Needs samples kept during the run: snapshots = N in [evaluate] keeps some every N rounds. For a run without them the
    latest state is drawn, ten examples of every class.
    """
    from fedalloy.core.errors import SpecError
    from fedalloy.experiment.recipe import reopen
    from fedalloy.experiment.records import snapshots
    from fedalloy.studies.synthetic.pictures import class_grid, growth_grid, is_picture, kept_rounds, write_png
    from fedalloy.studies.synthetic.quality import samples_of

    trained, kept = reopen(run), kept_rounds(run, rounds)
    bounds = trained.fed.task.bounds
    if kept:
        write_png(output, growth_grid([snapshots.load(run, round) for round in kept], bounds))
        typer.echo(f"{output}: rounds {', '.join(map(str, kept))}")
        return
    x, y = samples_of(trained, 10)
    if bounds is None or not is_picture(tuple(x.shape[1:]), bounds):
        raise SpecError("these examples are not pictures: use `fedalloy synth export`, which writes a table")
    write_png(output, class_grid(x, y, bounds))
    typer.echo(f"{output}: round {trained.round}; no samples were kept during the run (snapshots = N in [evaluate])")


def _rows(found: Quality) -> list[list[str]]:
    """Every number with its reference value."""
    leak, wire = found.leakage, found.wire
    verdict = "suspicious: it reveals its training examples" if leak.suspicious else "nothing suspicious"
    sure = f"0.5 +- {leak.margin:.3f} is chance; {verdict}"
    clients = found.to_json()["clients_accuracy"]
    return [
        ["Frechet distance", number(found.frechet), f"{found.frechet_real:.3f} of equally many real examples"],
        ["accuracy, trained on synthetic", number(found.synthetic_accuracy), f"{found.real_accuracy:.3f} on real ones"],
        ["the same, mean over clients", number(clients.get("mean")), f"lowest {number(clients.get('lowest'))}"],
        ["nearest training example", number(leak.to_train, 4), f"{leak.to_held_out:.4f} to the nearest held-out one"],
        ["share closer to training", number(leak.closer_to_train), "0.5 is chance"],
        ["membership AUC", number(leak.membership_auc), sure],
        ["near copies", str(leak.copies), f"of {leak.synthetic}"],
        ["bytes of the samples", str(wire["samples"]), f"{wire['classifier']} of the classifier's model"],
        ["bytes sent per client and round", str(wire["upload"]), f"{wire['download']} received"],
    ]
