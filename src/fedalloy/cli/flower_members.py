"""``fedalloy flower admit``, ``revoke``, ``rotate`` and ``renew``: the members of a federation and its certificates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedalloy.core.errors import SpecError

if TYPE_CHECKING:
    from fedalloy.flower.flwr_cli import FlwrCli

ServerFolder = Annotated[Path, typer.Argument(help="The server's folder (server.toml is in it).", metavar="DIR")]
NodeName = Annotated[str, typer.Argument(help="The node's name.", metavar="NAME")]
KeyFile = Annotated[Path, typer.Argument(help="The node's public key (node.key.pub).", metavar="KEY")]


@contextmanager
def commands_to(folder: Path) -> Iterator[FlwrCli]:
    """Commands to the server of a folder, which must be running."""
    from fedalloy.flower.flwr_cli import FlwrCli
    from fedalloy.flower.operations import answers, found

    place = found(folder)
    if not answers(place):
        raise SpecError(f"the server in {folder} is not running; start it: fedalloy flower server {folder}")
    with closing(FlwrCli(place)) as cli:
        yield cli


def admit(
    folder: ServerFolder,
    name: Annotated[str, typer.Argument(help="The name of a new node.", metavar="[NAME]")] = "",
    key: Annotated[Path | None, typer.Argument(help="Its public key (node.key.pub).", metavar="[KEY]")] = None,
) -> None:
    """Admit a new node, also in the middle of a run. Without NAME and KEY: admit exactly the nodes in DIR/nodes.

    Every start of the server admits exactly the nodes whose public keys are in DIR/nodes.
    """
    from fedalloy.flower.layout import ServerPlace
    from fedalloy.flower.members import add

    if bool(name) != bool(key):
        raise SpecError("give the name of the new node and its public key, or neither")
    if name and key:
        add(ServerPlace.read(folder), name, key)
    _apply(folder, needed=not name)


def revoke(folder: ServerFolder, name: NodeName) -> None:
    """Shut a node out at once, also in the middle of a run; its seat stays empty. Its key is kept in nodes/former.

    Flower registers no key twice: to come back, the node needs a new key (admit NAME KEY).
    """
    from fedalloy.flower.layout import ServerPlace
    from fedalloy.flower.members import remove

    remove(ServerPlace.read(folder), name)
    _apply(folder)


def rotate(folder: ServerFolder, name: NodeName, key: KeyFile) -> None:
    """Give a node a new key; name, seat and state stay the same. The old key is shut out at once.

    Certificates are different: server and front read them when they start ('renew' makes new ones). Restart the server
    then; nodes connect again by themselves.
    """
    from fedalloy.flower.layout import ServerPlace
    from fedalloy.flower.members import replace_key

    replace_key(ServerPlace.read(folder), name, key)
    _apply(folder)


def renew(
    folder: ServerFolder,
    ca_key: Annotated[
        Path | None, typer.Option("--ca-key", help="The authority's key; default: ca.key in DIR.", metavar="FILE")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="How long the new certificates are valid.")] = 397,
) -> None:
    """Make new certificates of the server and of the authority, before the old ones expire; keys and names stay.

    Restart the server, and send DIR/ca.crt to the nodes: until their old one expires they accept the server with that.
    """
    from fedalloy.flower.layout import ServerPlace
    from fedalloy.flower.pki import expires, renew_certificates

    place = ServerPlace.read(folder)
    if not place.secure:
        raise SpecError(f"the server in {folder} is not encrypted and has no certificates")
    before = renew_certificates(place.files, days, ca_key)
    typer.echo(f"new certificates in {folder}, valid until {expires(place.files.certificate):%Y-%m-%d}")
    typer.echo("restart the server: it reads them when it starts; the same 'run' command then continues the study")
    typer.echo(
        f"send {place.files.ca_certificate} to the operator of every node, who replaces ca.crt and restarts the node "
        f"before {before:%Y-%m-%d}: until then nodes accept the server with the old one too"
    )


def _apply(folder: Path, needed: bool = False) -> None:
    """Let the running server know; one that does not run reads the folder when it starts."""
    from fedalloy.flower.admission import admit as admit_all
    from fedalloy.flower.operations import answers, found

    if not needed and not answers(found(folder)):
        typer.echo("noted; the server is not running, and reads it when it starts")
        return
    with commands_to(folder) as cli:
        known = admit_all(cli.place, cli)
    typer.echo(f"admitted: {', '.join(known) or 'no nodes; put public keys (NAME.pub) into ' + str(folder / 'nodes')}")
    typer.echo("all other nodes are refused")
