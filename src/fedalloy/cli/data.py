"""``fedalloy data``: list data sets, show where their files are searched, fetch and check them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedalloy.cli.console import print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Json

app = typer.Typer(help="Data sets: list them, find, fetch and check their files.", no_args_is_help=True)


@app.command("list")
def list_data(as_json: Json = False) -> None:
    """List the data sets and whether their files are here."""
    from fedalloy.cli.docs import summary
    from fedalloy.core import registry
    from fedalloy.tasks import locate

    rows: list[dict[str, Any]] = []
    for name, loader in sorted(registry.everything("dataset").items()):
        files = dict(getattr(loader, "files", {}))
        missing = [file for file in files if locate.look(file) is None]
        ready = "missing: " + ", ".join(missing) if missing else "ready"
        rows.append({"name": name, "summary": summary(loader), "files": list(files), "ready": ready})
    if as_json:
        print_json(rows)
    else:
        print_table(["name", "what it is", "files"], [[r["name"], r["summary"], r["ready"]] for r in rows])


@app.command()
def where(as_json: Json = False) -> None:
    """Show the folders that are searched, in order (FEDALLOY_DATA first, then the user cache)."""
    from fedalloy.tasks import locate

    rows = [{"folder": str(folder), "exists": folder.is_dir()} for folder in locate.folders()]
    if as_json:
        print_json(rows)
    else:
        print_table(["folder", ""], [[str(r["folder"]), "there" if r["exists"] else "not there"] for r in rows])


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Files or data sets; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Compare data files with their checksums; exits with 1 when one of those named is missing or changed."""
    from fedalloy.core.errors import DataError, nearest
    from fedalloy.tasks import locate

    known = locate.known()
    chosen = [file for file, one in known.items() if not names or file in names or one.dataset in names]
    allowed = {*known, *(one.dataset for one in known.values())}
    for name in names or []:
        if name not in allowed:
            raise DataError(f"'{name}' has no files to check: {nearest(name, allowed)}")
    found = [locate.check(file) for file in chosen]
    if as_json:
        print_json([{"file": one.filename, "verdict": one.verdict, "path": one.path} for one in found])
    else:
        rows = [[one.filename, one.verdict, str(one.path or known[one.filename].hint)] for one in found]
        print_table(["file", "verdict", "where, or how to get it"], rows)
    wrong = [one for one in found if one.verdict == "changed" or (names and one.verdict == "missing")]
    raise typer.Exit(1 if wrong else 0)


@app.command()
def describe(
    source: Annotated[
        str, typer.Argument(help="A recipe (.toml), a data set's name, a folder, or package.module:function.")
    ],
    ids: Annotated[str | None, typer.Option(help="The column with the client of every row.")] = None,
    label: Annotated[str | None, typer.Option(help="The column with the label; default: y or label.")] = None,
    clients: Annotated[int | None, typer.Option(help="The number of clients, for a function or a partition.")] = None,
    partition: Annotated[str | None, typer.Option(help="A partition rule, where rows have no client.")] = None,
    classes: Annotated[int | None, typer.Option(help="The number of classes, where data are read on demand.")] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Show clients, sizes, classes, skew, missing values and duplicates between clients, before anybody trains.

    Of data that are read on demand, 1000 clients are looked at.
    """
    from fedalloy.experiment.recipe import load, resolve
    from fedalloy.tasks.making import task

    if source.endswith(".toml"):
        made = resolve(load(Path(source), None)).task()
    else:
        columns = {"label": label} if label else None
        made = task(source, None, partition, clients, ids=ids, columns=columns, classes=classes)
    found = made.describe()
    if as_json:
        print_json(found.to_json())
    else:
        print_table(["", ""], [list(line) for line in found.lines()])


@app.command()
def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="mnist, fashion-mnist, cifar10, cifar100, femnist, shakespeare, ...; a wrong name lists all."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder; default: FEDALLOY_DATA or the user cache.")
    ] = None,
    given: Annotated[
        list[Path] | None, typer.Option("--from", help="A file that you downloaded; repeat it for several.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="official or hub; default: the first that answers.")] = None,
    sha256: Annotated[str | None, typer.Option(help="The checksum to trust, where none is published.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Another address: of the file, or of the folder that holds all files.")
    ] = None,
    max_unpacked_mb: Annotated[
        float, typer.Option(help="Refuse files that unpack to more megabytes than this.")
    ] = 2048,
    as_json: Json = False,
) -> None:
    """Download a data set, check it and convert it to what its loader reads; an interrupted download continues.

    Official sources are tried first, then the Hugging Face hub. Where no checksum is published, that of the first
    download is recorded in fetched.json, and later ones are compared. Nothing in a download is executed.
    """
    from fedalloy.tasks import originals
    from fedalloy.tasks.fetching import FetchRequest, prepare

    folder = output or originals.folder_for_data()
    wish = FetchRequest(name, source, url, sha256, tuple(given or ()), max_unpacked_mb)
    say = (lambda text: None) if as_json else typer.echo
    found = prepare(wish, folder, say)
    if as_json:
        print_json({"dataset": found.dataset, "files": [str(path) for path in found.files], "notes": list(found.notes)})
        return
    for path in found.files:
        typer.echo(f"{path}: there")
    for note in found.notes:
        typer.echo(note)
