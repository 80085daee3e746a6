"""Runs as chart data: plain values that ``json.dumps`` takes, drawn by ``assets/charts.js``.

Every function takes run summaries (:func:`fedalloy.results.summaries.gather`) and returns a chart, a list of charts, or
None where the runs have nothing to draw. A chart is a dict with ``id``, ``kind``, ``title``, ``note`` and the keys of
its kind; ``fedalloyCharts.figure(element, chart)`` draws it with its table and its buttons.
Sizes do not grow with the run: at most 400 points on a line, 40,000 cells in a heat map.
"""

from fedalloy.report.data.clients import distribution, heterogeneity, worst_clients
from fedalloy.report.data.cost import cost_bars, cost_rows
from fedalloy.report.data.curves import curves, losses
from fedalloy.report.data.gains import largest_losses, sorted_gains
from fedalloy.report.data.info import info_charts
from fedalloy.report.data.participation import participation, participation_rows
from fedalloy.report.data.personal import mixture, reliability
from fedalloy.report.data.pictures import pictures
from fedalloy.report.data.results import OPEN, fairness_rows, result_rows, styles, verdict_text
from fedalloy.report.data.weights import weights

__all__ = [
    "OPEN",
    "cost_bars",
    "cost_rows",
    "curves",
    "distribution",
    "fairness_rows",
    "heterogeneity",
    "info_charts",
    "largest_losses",
    "losses",
    "mixture",
    "participation",
    "participation_rows",
    "pictures",
    "reliability",
    "result_rows",
    "sorted_gains",
    "styles",
    "verdict_text",
    "weights",
    "worst_clients",
]
