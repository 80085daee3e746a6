"""The command group, and how errors of commands become messages and exit codes."""

from __future__ import annotations

from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedalloy.cli import (
    advise,
    compare,
    conform,
    data,
    doctor,
    export,
    flower,
    listing,
    node,
    plot,
    recipe,
    report,
    reproduce,
    run,
    serve,
    show,
    synth,
    tune,
    unfold,
    unseen,
)
from fedalloy.cli.console import complain, tell_notes
from fedalloy.cli.failing import exit_code, sentence
from fedalloy.cli.helping import teach
from fedalloy.experiment.interrupt import Terminated

EXIT_CODES = (
    "Exit codes: 0 success, 1 a run failed or something does not match, 2 wrong usage or a wrong recipe, 3 not built, "
    "130 interrupted, 143 ended by SIGTERM."
)


class Commands(TyperGroup):
    """A group whose commands end in one clear line instead of a traceback."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        teach(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; with ``--debug`` errors pass through."""
        tell_notes()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            complain("interrupted")
            raise typer.Exit(143 if isinstance(interrupt, Terminated) else 130) from None
        except Exception as error:
            said = sentence(error)
            if said is None or ctx.params.get("debug"):
                raise
            complain(said)
            raise typer.Exit(exit_code(error)) from None


app = typer.Typer(
    name="fedalloy",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import fedalloy

        typer.echo(f"fedalloy {fedalloy.__version__}")
        raise typer.Exit


@app.callback()
def fedalloy(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning over clients that differ: run it, compare it, see who is served badly."""


app.command(epilog=EXIT_CODES)(run.run)
app.command(epilog=EXIT_CODES)(compare.compare)
app.command(epilog=EXIT_CODES)(tune.tune)
app.command(epilog=EXIT_CODES)(advise.advise)
app.command(epilog=EXIT_CODES)(reproduce.reproduce)
app.command("list")(listing.list_rules)
app.command()(show.show)
app.command(epilog=EXIT_CODES)(conform.conform)
app.add_typer(data.app, name="data")
app.command()(report.report)
app.command(epilog=EXIT_CODES)(export.export)
app.command(epilog=EXIT_CODES)(serve.serve)
app.command(epilog=EXIT_CODES)(plot.plot)
app.command(epilog=EXIT_CODES)(unseen.unseen)
app.command("newcomers", hidden=True)(unseen.unseen)  # its name in the last version
app.add_typer(synth.app, name="synth")
app.command(epilog=EXIT_CODES)(unfold.unfold)
app.add_typer(recipe.app, name="recipe")
app.add_typer(flower.app, name="flower")
app.add_typer(node.app, name="node")
app.command(epilog=EXIT_CODES)(doctor.doctor)
