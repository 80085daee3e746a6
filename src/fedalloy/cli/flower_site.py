"""Commands for the operator of a site: look at a study, approve it, withdraw and forget it, and check the audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NodeFolder = Annotated[Path, typer.Argument(help="The node's folder (node.toml is in it).", metavar="DIR")]
StudyFile = Annotated[Path, typer.Argument(help="The recipe of the study (.toml).", metavar="RECIPE")]
Study = Annotated[str, typer.Argument(help="The study's hash, the beginning of it, or its name.", metavar="STUDY")]


def review(
    recipe: StudyFile,
    node: Annotated[Path | None, typer.Option("--node", help="The node's folder, to check its policy too.")] = None,
) -> None:
    """Say in plain words what a study will do at a site, what it sends and keeps, and show its hash.

    The hash follows from what nodes are asked to do, so a server that asks for something else has another one.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.review import Review, policy_at

    policy = policy_at(node) if node else None
    typer.echo(Review.of(load(recipe), models=policy.models if policy else ()).text(policy))


def approve(folder: NodeFolder, recipe: StudyFile) -> None:
    """Approve a study at this site. With 'require_approval = true' in policy.toml, the node takes part in no other."""
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.node.approval import Approvals
    from fedalloy.flower.review import Review, policy_at

    policy = policy_at(folder)
    found = Review.of(load(recipe), models=policy.models)
    Approvals(_store(folder)).approve(found.study, recipe.stem, found.rounds, found.metrics)
    scored = ", ".join(found.metrics) or "nothing"
    typer.echo(f"approved '{recipe.stem}' for {found.rounds} rounds, scored by {scored}: {found.study}")
    for why in found.objections(policy):
        typer.echo(f"note: the policy of this node still refuses it: {why}")
    if not policy.require_approval:
        typer.echo("note: policy.toml does not require approvals (require_approval), so other studies are accepted too")


def withdraw(folder: NodeFolder, study: Study) -> None:
    """Withdraw the approval of a study: the node refuses its next order. What it keeps of the study stays."""
    from fedalloy.flower.node.approval import Approvals

    typer.echo(f"withdrawn: {Approvals(_store(folder)).withdraw(study)}")


def forget(folder: NodeFolder, study: Study) -> None:
    """Withdraw the approval of a study, and delete what this node keeps of it. The audit log stays.

    Studies that were withdrawn before, or never needed an approval, are known too: by the hash that 'review' shows.
    """
    from fedalloy.flower.node.approval import Approvals
    from fedalloy.flower.review import policy_at

    approvals = Approvals(_store(folder))
    found = approvals.find(study)
    if found in approvals.read():
        approvals.withdraw(found)
    gone = approvals.forget(found)
    typer.echo(f"deleted {len(gone)} folders of the study {found[:16]}")
    if not policy_at(folder).require_approval:
        typer.echo("note: policy.toml does not require approvals, so the next order of this study is carried out again")


def audit(
    folder: NodeFolder,
    known: Annotated[
        str, typer.Option("--known", metavar="HASH", help="A hash noted earlier, which must be there.")
    ] = "",
) -> None:
    """Check the audit log of a node: that no entry was changed, removed or inserted. Shows the hash to note."""
    from fedalloy.flower.node.audit import FILE, verify

    store = _store(folder)
    count, last = verify(store, known)
    typer.echo(f"{store / FILE}: {count} entries, none changed; the last one has the hash {last}")


def _store(folder: Path) -> Path:
    """The store of a node, whether its data are configured yet or not."""
    from fedalloy.flower.layout import NodePlace

    return NodePlace.read(folder, trial=True).config.store
