// A chart with everything around it: title, switches, the table behind it, saving as PNG, SVG and CSV.
//   const figure = fedalloyCharts.figure(element, chart, {start: {metric: "loss"}});
//   figure.update(newChart);   // for live pages
(function () {
  "use strict";
  const charts = window.fedalloyCharts;
  const MOST_ROWS = 200;
  const AXES = { round: "against rounds", megabytes: "against megabytes", seconds: "against simulated time" };
  const figures = new Set();

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  charts.figure = function (element, chart, options) {
    const figure = { element, chart, state: { ...((options || {}).start || {}) }, drawn: false };
    element.classList.add("figure");
    element.dataset.id = chart.id;
    figure.head = element.appendChild(make("div", "figure-head"));
    figure.controls = element.appendChild(make("div", "controls"));
    figure.place = element.appendChild(make("div", "place"));
    figure.note = element.appendChild(make("p", "soft"));
    figure.table = element.appendChild(make("div", "behind"));
    figure.table.hidden = true;
    head(figure);
    figure.update = (fresh) => { figure.chart = fresh; head(figure); draw(figure); };
    figures.add(figure);
    watch(figure);
    return figure;
  };

  // Charts are drawn when they are about to become visible, so that a long page loads quickly.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) ensure(entry.target.fedalloyFigure);
  }, { rootMargin: "400px" });
  const sized = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const figure = entry.target.fedalloyFigure;
      if (figure.drawn && Math.abs(entry.contentRect.width - figure.width) > 1) draw(figure);
    }
  });
  function watch(figure) {
    figure.place.fedalloyFigure = figure;
    figure.place.style.minHeight = "180px";
    seen.observe(figure.place);
    sized.observe(figure.place);
  }
  const ensure = (figure) => { if (!figure.drawn) draw(figure); };
  charts.show = (element) => figures.forEach((figure) => figure.element === element && ensure(figure));
  charts.redraw = () => figures.forEach((figure) => figure.drawn && draw(figure));
  charts.drawAll = () => figures.forEach(ensure);

  function draw(figure) {
    const width = Math.floor(figure.place.clientWidth);
    if (!width) return;
    const chart = resolve(figure.chart, figure.state);
    charts.hideTip();
    figure.width = width;
    figure.place.replaceChildren();
    const empty = reasonForEmpty(chart);
    if (empty) figure.place.append(make("p", "empty", empty));
    else charts[chart.kind](figure.place, chart, width);
    figure.place.style.minHeight = "";
    figure.note.textContent = chart.note || "";
    figure.drawn = true;
    if (!figure.table.hidden) fill(figure);
  }
  function reasonForEmpty(chart) {
    const nothing = chart.kind === "line" && !chart.series.some((one) => one.y.some((value) => value !== null));
    return nothing ? "Nothing to draw yet: no run has a value here." : "";
  }

  // Curves hold every metric, statistic and axis; one of each is drawn.
  function resolve(chart, state) {
    if (chart.kind !== "curves") return chart;
    const metric = chart.metrics.includes(state.metric) ? state.metric : chart.metrics[0];
    const statistic = chart.statistics[state.statistic] ? state.statistic : Object.keys(chart.statistics)[0];
    const axis = chart.axes[state.axis] ? state.axis : "round";
    const having = chart.series.filter((one) => one.values[metric] && one.values[metric][statistic]);
    const series = having.map((one) => ({ name: one.name, x: one[axis], ...one.values[metric][statistic] }));
    const target = chart.target && chart.target.metric === metric ? chart.target.value : undefined;
    return { ...chart, kind: "line", x: chart.axes[axis] || axis, y: metric, series, target,
      id: `${chart.id}-${metric}-${statistic}-${axis}`, title: `${metric}, ${chart.statistics[statistic]}` };
  }

  function head(figure) {
    const { chart } = figure, title = make("h3", "", chart.kind === "curves" ? "" : chart.title);
    const bar = make("div", "tools");
    const table = button("Table", () => toggle(figure, table));
    table.setAttribute("aria-expanded", String(!figure.table.hidden));
    bar.append(table, ...["CSV", "SVG", "PNG"].map((kind) => button(kind, () => charts.save(figure, kind), `Save as ${kind}`)));
    figure.head.replaceChildren(title, bar);
    figure.controls.replaceChildren();
    if (chart.kind === "curves") {
      title.textContent = resolve(chart, figure.state).title;
      if (chart.metrics.length > 1) choice(figure, "metric", "Metric", Object.fromEntries(chart.metrics.map((name) => [name, name])));
      choice(figure, "statistic", "Statistic", chart.statistics);
      if (Object.keys(chart.axes).length > 1) choice(figure, "axis", "Against", Object.fromEntries(Object.keys(chart.axes).map((key) => [key, AXES[key] || key])));
    }
  }
  function button(text, action, label) {
    const made = make("button", "tool", text);
    made.type = "button";
    if (label) { made.setAttribute("aria-label", label); made.title = label; }
    made.addEventListener("click", action);
    return made;
  }
  function choice(figure, key, label, options) {
    const select = figure.controls.appendChild(make("select"));
    select.setAttribute("aria-label", label);
    select.dataset.choice = key;
    for (const [value, said] of Object.entries(options)) select.append(new Option(said, value));
    if (options[figure.state[key]]) select.value = figure.state[key];
    select.addEventListener("change", () => {
      const same = key === "axis" ? [...figures].filter((one) => one.chart.kind === "curves") : [figure];
      for (const one of same) { one.state[key] = select.value; head(one); if (one.drawn) draw(one); }
      const again = figure.controls.querySelector(`[data-choice=${key}]`);
      if (again) again.focus();
    });
  }

  // Tables --------------------------------------------------------------------------------------------------------------
  const joined = (lists) => lists.flat();
  const tables = {
    line: (c) => [["series", c.x, c.y, ...(c.series.some((s) => s.low) ? ["low", "high"] : [])],
      joined(c.series.map((s) => s.x.map((x, i) => [s.name, x, s.y[i], ...(s.low ? [s.low[i], s.high[i]] : [])])))],
    strip: (c) => [["series", "client", c.x, ...(c.groups[0].examples ? ["examples"] : [])],
      joined(c.groups.map((g) => g.values.map((value, i) => [g.name, g.labels[i], value, ...(g.examples ? [g.examples[i]] : [])])))],
    heat: (c) => [["panel", c.rows.title, c.columns.title, c.value], joined(c.panels.map((p) => joined(p.values.map((row, r) =>
      row.map((value, i) => [p.title, c.rows.labels[r], c.columns.labels[i], value])))))
      .filter((row) => row[3] !== null)],
    sorted: (c) => [["series", "client", `under ${c.against}`, "under the algorithm", c.y],
      joined(c.groups.map((g) => g.values.map((value, i) => [g.name, g.labels[i], g.before[i], g.after[i], value])))],
    forest: (c) => [["federation", "series", c.x, "low", "high", "verdict"],
      joined(c.rows.map((row) => row.points.map((p) => [row.name, p.name, p.value, p.low, p.high, p.outcome])))],
    ranks: (c) => [["series", "average rank"], c.points.map((p) => [p.name, p.rank])],
    bars: (c) => [["name", c.x], c.bars.map((bar) => [bar.name, bar.value])],
    calibration: (c) => [["bin from", "bin to", "confidence", "accuracy", "examples"], c.accuracy.map((accuracy, i) =>
      [i / c.bins, (i + 1) / c.bins, c.confidence[i], accuracy, c.count[i]])],
    pictures: (c) => [["round", "class", "png"], c.cells.map((one) => [one.round, one.class, one.image])],
  };
  charts.tableOf = (chart) => {
    const [columns, rows] = tables[chart.kind](chart);
    return { columns, rows };
  };
  function toggle(figure, control) {
    figure.table.hidden = !figure.table.hidden;
    control.setAttribute("aria-expanded", String(!figure.table.hidden));
    if (!figure.table.hidden) fill(figure);
  }
  function fill(figure) {
    const { columns, rows } = charts.tableOf(resolve(figure.chart, figure.state));
    const table = make("table"), top = table.createTHead().insertRow(), body = table.createTBody();
    columns.forEach((name) => { const cell = top.appendChild(make("th", "", name)); cell.scope = "col"; });
    rows.slice(0, MOST_ROWS).forEach((row) => {
      const line = body.insertRow();
      row.forEach((value) => { line.insertCell().textContent = value === null ? "" : String(value).startsWith("data:") ? "(picture)" : charts.number(value); });
    });
    const wide = make("div", "wide low");
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", `Table: ${figure.chart.title}`);
    wide.append(table);
    figure.table.replaceChildren(wide);
    if (rows.length > MOST_ROWS) figure.table.append(make("p", "soft", `The first ${MOST_ROWS} of ${rows.length} rows; the CSV has all.`));
  }

  // Saving --------------------------------------------------------------------------------------------------------------
  charts.csv = ({ columns, rows }) => {
    const cell = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      // A name that begins like a formula must not be evaluated by a spreadsheet.
      const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
      return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
    };
    return `${[columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
  };
  charts.save = async function (figure, kind) {
    ensure(figure);
    const chart = resolve(figure.chart, figure.state), name = chart.id.replace(/[^\w.-]+/g, "-");
    if (kind === "CSV") return deliver(new Blob([charts.csv(charts.tableOf(chart))], { type: "text/csv" }), `${name}.csv`);
    const svg = figure.place.querySelector("svg");
    if (!svg) return undefined;
    const text = standalone(svg);
    if (kind === "SVG") return deliver(new Blob([text], { type: "image/svg+xml" }), `${name}.svg`);
    return deliver(await png(text, svg), `${name}.png`);
  };
  function deliver(blob, name) {
    const link = make("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  const KEPT = ["paint-order", "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity", "font-size", "font-family", "font-weight", "image-rendering", "display"];
  // Saved files have no style sheets: computed styles are written into the copy.
  function standalone(svg) {
    const copy = svg.cloneNode(true), from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((node, i) => {
      const style = getComputedStyle(node);
      KEPT.forEach((name) => to[i].style.setProperty(name, style.getPropertyValue(name)));
      to[i].style.removeProperty("--own");
      to[i].removeAttribute("class");
    });
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    paper.setAttribute("width", "100%");
    paper.setAttribute("height", "100%");
    paper.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
    copy.prepend(paper);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    return new XMLSerializer().serializeToString(copy);
  }
  async function png(text, svg) {
    const image = new Image(), box = svg.viewBox.baseVal, scale = 2;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const canvas = make("canvas");
    canvas.width = box.width * scale;
    canvas.height = box.height * scale;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }
})();
