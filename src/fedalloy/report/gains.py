"""The section about single clients: who gains and who loses against the first algorithm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedalloy.report import data, markup
from fedalloy.report.context import ReportContext
from fedalloy.report.markup import Cell, count, empty, figure, named, paragraph, table, text
from fedalloy.results.gains import ClientGains, gain_text, share_text

TITLE = "Who gains, who loses"


def section(context: ReportContext) -> str:
    """Shares of clients better and worse off, sorted differences, and the largest losses by name."""
    if not context.gains:
        return ""
    known = [one for one in context.gains if one.clients]
    reasons = "".join(empty(f"{one.name}: {one.reason}.") for one in context.gains if not one.clients)
    if not known:
        return markup.section("gains", TITLE, reasons)
    parts = [_counts(context, known), *_words(known), figure("gains"), _losses(context, known), reasons]
    return markup.section("gains", TITLE, *parts)


def _counts(context: ReportContext, known: Sequence[ClientGains]) -> str:
    head = ["algorithm", "better off", "worse off", "equal", "clients", "seeds"]
    return table("Who gains, who loses", head, [_row(context, one) for one in known])


def _row(context: ReportContext, one: ClientGains) -> list[Cell]:
    total = len(one.clients)
    equal = total - one.better - one.worse
    shares = [_share(one, sign) for sign in (1, -1)]
    about = Cell(f"{total} over all seeds" if one.redrawn else f"{total}", total)
    return [named(one.name, context.styles), *shares, count(equal), about, count(len(one.seeds))]


def _share(one: ClientGains, sign: int) -> Cell:
    """How many clients, and their share; its range over seeds where these have different clients."""
    shares = one.shares(sign)
    mean, inside = share_text(shares)
    number = one.better if sign > 0 else one.worse
    return Cell(f"{mean}{inside}" if one.redrawn else f"{number} ({mean})", statistics.fmean(shares))


def _words(known: Sequence[ClientGains]) -> list[str]:
    """What the counts are based on, and what can be said about single clients."""
    said = dict.fromkeys(f"{one.basis}." for one in known)
    said |= dict.fromkeys(_single(one) for one in known)
    missing = sum(one.missing for one in known)
    rest = [f"{missing} clients without a score under one of the two are not counted."] if missing else []
    return [paragraph(" ".join([*said, *rest]).strip(), "soft")]


def _single(one: ClientGains) -> str:
    if one.redrawn:
        return "Client 3 of one seed is somebody else than client 3 of another, so no client has a mean over seeds."
    if one.resplit:
        return "Seeds draw other test examples of the same clients, which they share: no single client is judged."
    if one.decided is None:
        return f"No single client can be told from chance: with {len(one.clients)} clients that takes " + (
            f"{one.seeds_needed} seeds."
        )
    better, worse = one.decided
    return f"{one.name}: {better} clients better and {worse} worse off at 95 % (exact test, Holm over clients)."


def _losses(context: ReportContext, known: Sequence[ClientGains]) -> str:
    rows = data.largest_losses(known)
    if not rows:
        return paragraph("No client is worse off.", "soft")
    metric, against = known[0].metric, known[0].against
    head = ["algorithm", "client", f"{metric} under {against}", f"{metric} under the algorithm", "gain", "seeds"]
    body = [
        [named(row["name"], context.styles), text(row["client"]), _value(row["first"]), _value(row["score"]),
         Cell(gain_text(row["gain"]) if row["gain"] is not None else "not finite", row["gain"]), count(row["seeds"])]
        for row in rows
    ]  # fmt: skip
    return "<h3>Largest losses</h3>" + table("Largest losses", head, body, kind="low")


def _value(value: float | None) -> Cell:
    return count(value, 3) if value is not None else Cell("not finite", None)
