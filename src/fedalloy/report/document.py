"""The frame of a page: one self-contained file, no network, no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from string import Template
from typing import Any

from fedalloy.report import assets
from fedalloy.report.markup import plain_json

# The policy enforces that the page never uses the network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="generator" content="fedalloy">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header class="top"><div class="inner">
<span class="brand">fedalloy</span><nav aria-label="Sections" tabindex="0">$links</nav>
<button type="button" data-action="print">Print</button><button type="button" data-action="theme">Theme</button>
</div></header>
<main>
<h1>$title</h1>
$verdict
$facts
$body
<footer class="soft">Made by fedalloy. Every chart has a table behind it and can be saved as CSV, SVG or PNG.</footer>
</main>
<script type="application/json" id="fedalloy-data">$data</script>
<script>$script</script>
</body>
</html>
""")
_PLACE = re.compile(r'<section id="([\w-]+)"')


def document(
    title: str, verdict: str, facts: Mapping[str, tuple[str, str]], parts: Mapping[str, str], data: Any
) -> str:
    """The page as text: its first line, key numbers with a word about each, and sections by their short names."""
    links = "".join(_link(short, made) for short, made in parts.items())
    told = "".join(_fact(label, *about) for label, about in facts.items())
    return PAGE.substitute(
        policy=POLICY, title=escape(title), style=assets.style(), links=links, verdict=verdict,
        facts=f'<dl class="facts">{told}</dl>', body="\n".join(parts.values()), data=plain_json(data),
        script=assets.script(),
    )  # fmt: skip


def _link(short: str, section: str) -> str:
    found = _PLACE.match(section)
    return f'<a href="#{found[1]}">{short}</a>' if found else ""


def _fact(label: str, value: str, about: str) -> str:
    return f'<div class="fact"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(about)}</small></dd></div>'
