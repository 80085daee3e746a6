"""``fedalloy flower``: real federations, from a trial on this machine to sites that share nothing but model updates."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedalloy.cli.console import complain, number, print_table
from fedalloy.cli.failing import exit_code
from fedalloy.cli.flower_backup import backup, restore
from fedalloy.cli.flower_members import ServerFolder, admit, commands_to, renew, revoke, rotate
from fedalloy.cli.flower_node import doctor, dry_run
from fedalloy.cli.flower_site import approve, audit, forget, review, withdraw
from fedalloy.cli.flower_status import logs, missing_rows, status
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Changes, Quick

if TYPE_CHECKING:
    from fedalloy.flower.control import Control
    from fedalloy.flower.flwr_cli import SubmittedRun
    from fedalloy.flower.service_log import ServiceLog

EXAMPLES = """
Try it here:  fedalloy flower up recipes/quickstart.toml --nodes 3

For real, four steps:  'init' writes the folders of a federation;  'server' starts the server;  'node' starts a node, on
its own machine, with its own data;  'run' gives the server a recipe.  'status' shows nodes, rounds and drop-outs.

Everything is encrypted, and nodes authenticate with keys. Nothing is sent to third parties.
docs/flower-site.md lists what is transferred.
"""
app = typer.Typer(
    help=f"Real federations on Flower (needs the extra 'flower' of the package).\n\n{EXAMPLES}", no_args_is_help=True
)

Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="No encryption, no keys, any node may join. For tests on one machine only."),
]
Seed = Annotated[int | None, typer.Option(help="The seed; default: the recipe's first.")]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", help="Serve metrics for Prometheus on this port of 127.0.0.1 (extra 'metrics')."),
]
Format = Annotated[
    Literal["text", "json"],
    typer.Option("--log-format", help="json: one object per line, with time, level, process and message."),
]
RecipeFile = Annotated[Path, typer.Argument(help="A recipe (.toml).", metavar="RECIPE")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.", metavar="DIR")],
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes, called node-0, node-1, ...")] = 3,
    names: Annotated[str, typer.Option("--names", metavar="A,B,...", help="Names instead of --nodes.")] = "",
    host: Annotated[
        str, typer.Option("--host", help="The host name or address at which nodes reach the server.")
    ] = "localhost",
    port: Annotated[int, typer.Option("--port", help="The server's port.")] = 9092,
    days: Annotated[int, typer.Option("--days", help="How long the certificates are valid.")] = 397,
    insecure: Insecure = False,
) -> None:
    """Write the folders of a federation: settings, certificates, keys, systemd units, instructions for operators.

    Nothing that exists is overwritten. Each folder under DIR/nodes goes to the operator of that node;
    DIR/README.md explains how.
    """
    from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation

    chosen = tuple(name.strip() for name in names.split(",")) if names else numbered(nodes)
    write_federation(folder, FederationPlan(chosen, host=host, port=port, secure=not insecure, days=days))
    typer.echo(f"wrote a federation of {len(chosen)} nodes to {folder}; next steps: {folder / 'README.md'}")
    if insecure:
        complain("this federation is not encrypted and admits any node: for tests on one machine only")


@app.command()
def up(
    recipe: RecipeFile,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="How many nodes; the recipe then has as many clients. Default: as in the recipe."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The run folder; default: runs/NAME-flower.")
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", help="A folder of 'init' to use; default: one made in the run folder."),
    ] = None,
    changes: Changes = None,
    quick: Quick = False,
    seed: Seed = None,
    insecure: Insecure = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run a recipe on a complete federation on this machine: a server and its nodes, encrypted, on free ports.

    After Ctrl-C or a crash the same command continues after the last finished round. The run folder has the format of
    'fedalloy run'; 'show', 'report' and 'compare' read it.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.experiment.recipe import quick as shortened
    from fedalloy.flower.trial import trial_of

    wanted = load(recipe, changes)
    folder = output or Path("runs") / f"{recipe.stem}-flower"
    trial = trial_of(shortened(wanted) if quick else wanted, folder, nodes, federation, seed, not insecure)
    if trial.finished:
        typer.echo(f"{folder} holds this run already, finished; choose another folder with -o to run it again")
        raise typer.Exit
    if insecure:
        complain("no encryption (--insecure)")
    try:
        with _ends_on_sigterm():
            ended = trial.run(typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues after the last finished round")
        raise typer.Exit(130) from None
    _finish(ended, folder)


@app.command("run")
def run_on(
    server: ServerFolder,
    recipe: RecipeFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder, on this machine.")],
    changes: Changes = None,
    seed: Seed = None,
    allow_imports: AllowImports = False,
) -> None:
    """Give a recipe to a running server, on the server's machine, and follow it.

    The same command follows the run if it is still going on, and continues it if it was interrupted. Ctrl-C stops
    following; the run itself continues. 'fedalloy flower stop DIR' ends it.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.submission import COMPLETED, Study

    with commands_to(server) as cli:
        study = Study(cli, load(recipe, changes), output, seed)
        try:
            ended = study.run_to_end(typer.echo)
        except KeyboardInterrupt:
            typer.echo(f"no longer followed; the run itself continues ('fedalloy flower stop {server}' ends it)")
            raise typer.Exit(130) from None
        if ended != COMPLETED and study.run:
            typer.echo(_tail(study.run))
    _finish(ended, output)


Wait = Annotated[float, typer.Option("--wait", help="Seconds for the round in progress; 0 ends it at once.")]


@app.command()
def stop(server: ServerFolder, wait: Wait = 60.0) -> None:
    """Stop the unfinished runs of a server after the round in progress; 'run' can continue them later."""
    with _control(server, wait) as control:
        ended = control.stop()
    typer.echo(f"stopped {', '.join(ended)}" if ended else "nothing was running")


@app.command()
def pause(server: ServerFolder, wait: Wait = 60.0) -> None:
    """Stop the unfinished runs of a server after the round in progress, until 'resume'; the server itself runs on."""
    with _control(server, wait) as control:
        ended = control.pause()
    typer.echo(f"paused {', '.join(ended)}" if ended else "nothing was running")


@app.command()
def resume(server: ServerFolder) -> None:
    """Continue the runs that were paused, each after its last finished round."""
    with _control(server) as control:
        started = control.resume()
    typer.echo(f"resumed as {', '.join(started)}" if started else "nothing was paused")


@app.command()
def server(folder: ServerFolder, metrics_port: MetricsPort = None, log_format: Format = "text") -> None:
    """Start the server of a federation, admit the nodes whose public keys are in DIR/nodes, and wait until it ends."""
    from fedalloy.flower.server_service import serve
    from fedalloy.flower.service_log import log_as

    log = log_as(log_format, typer.echo)
    with _faults_in(log, log_format):
        raise typer.Exit(serve(folder, log, metrics_port))


@app.command()
def node(
    folder: Annotated[Path, typer.Argument(help="The node's folder (node.toml is in it).", metavar="DIR")],
    metrics_port: MetricsPort = None,
    log_format: Format = "text",
) -> None:
    """Run a node, on the machine where its data are, until SIGTERM or Ctrl-C.

    It waits until the server lets it in, says why it is not let in yet, and connects again after a restart of either
    side. A node that was killed is let in again at once.
    """
    from fedalloy.flower.node_service import keep_running
    from fedalloy.flower.service_log import log_as

    log = log_as(log_format, typer.echo)
    with _faults_in(log, log_format):
        raise typer.Exit(keep_running(folder, log, metrics_port))


OF_SERVERS, OF_SITES = (admit, revoke, rotate, renew, status, logs, backup, restore), (doctor, dry_run, review, approve)
for command in (*OF_SERVERS, *OF_SITES, withdraw, forget, audit):
    app.command()(command)


@contextmanager
def _faults_in(log: ServiceLog, form: str) -> Iterator[None]:
    """Why a service does not start is a line of its log too, where that is read by a machine."""
    from fedalloy.core.errors import FedalloyError

    try:
        yield
    except FedalloyError as error:
        if form == "text":
            raise
        log.say(f"ERROR: {error}")
        raise typer.Exit(exit_code(error)) from None


@contextmanager
def _control(folder: Path, patience: float = 60.0) -> Iterator[Control]:
    from fedalloy.flower.control import Control

    with commands_to(folder) as cli:
        yield Control(cli, typer.echo, patience)


def _finish(ended: str, folder: Path) -> None:
    """Print how a run ended; the exit code is 0 only for one that is finished."""
    from fedalloy.flower.submission import COMPLETED, state_of
    from fedalloy.results.outcome import read_outcome

    if state_of(folder) == "stopped":
        typer.echo(f"the run in {folder} was stopped on request; the same command continues it")
        raise typer.Exit(1)
    if ended != COMPLETED:
        log = folder / "federation.log"
        where = f" (reason: {log})" if log.exists() else ""
        complain(f"the run ended as {ended}{where}. The same command continues it")
        raise typer.Exit(1)
    outcome = read_outcome(folder)
    if outcome.scores:
        shown = [number(outcome.scores.get(name)) for name in ("mean", "worst_served", "best_served")]
        print_table([f"{outcome.metric} (mean)", "worst 10 %", "best 10 %"], [shown], numbers=range(3))
    if rows := missing_rows(folder):
        print_table(["missing at the end", "last contributed to", "why"], rows)
    typer.echo(f"finished in round {outcome.round}; records in {folder}")


def _tail(run: SubmittedRun) -> str:
    return "\n".join(run.log().splitlines()[-20:])


class _ends_on_sigterm:  # noqa: N801 (reads as a phrase in a with statement)
    """SIGTERM ends a trial like Ctrl-C: all its processes stop too."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt
