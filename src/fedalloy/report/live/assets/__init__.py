"""The files of the page by name: a fixed list, so that no name can reach another file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_HTML, _SCRIPT, _STYLE = "text/html", "text/javascript", "text/css"
_KNOWN = {
    "live.html": ("fedalloy.report.live", "assets/live.html", _HTML),
    "live.js": ("fedalloy.report.live", "assets/live.js", _SCRIPT),
    "live.css": ("fedalloy.report.live", "assets/live.css", _STYLE),
    "charts.js": ("fedalloy.report", "assets/charts.js", _SCRIPT),
    "figures.js": ("fedalloy.report", "assets/figures.js", _SCRIPT),
    "page.js": ("fedalloy.report", "assets/page.js", _SCRIPT),
    "theme.css": ("fedalloy.report", "assets/theme.css", _STYLE),
    "d3.js": ("fedalloy.report", "assets/vendor/d3.min.js", _SCRIPT),
}


@cache
def asset(name: str) -> tuple[str, bytes] | None:
    """Type and content of a file of the page, or None."""
    if name == "palette.css":
        from fedalloy.report.palette import css

        return _STYLE, css().encode()
    if name not in _KNOWN:
        return None
    package, path, kind = _KNOWN[name]
    return kind, files(package).joinpath(path).read_bytes()
