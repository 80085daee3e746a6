// Draws chart data (fedalloy.report.data) as SVG with D3. Colours are custom properties of the page, so that only heat
// maps are redrawn when the theme changes. Every function: (element, chart, width) -> the svg element.
(function () {
  "use strict";
  const charts = (window.fedalloyCharts = window.fedalloyCharts || {});
  let styles = {};

  charts.setStyles = (given) => { styles = { ...styles, ...given }; };
  // Series that belong to no algorithm have a neutral colour.
  charts.colour = (name) => (styles[name] ? `var(--c${styles[name].slot})` : "var(--soft)");
  const dash = (name) => ((styles[name] || {}).dash || []).join(" ") || null;

  // Numbers -------------------------------------------------------------------------------------------------------------
  charts.number = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "none";
    if (typeof value !== "number") return String(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return d3.format(",")(value);
    return size >= 1e6 || size < 1e-3 ? d3.format(".3~g")(value) : d3.format(",.4~r")(value);
  };
  const short = (value) => (Math.abs(value) >= 1e4 ? d3.format(".3~s")(value) : d3.format(".4~g")(value));
  const fitting = (width) => Math.max(5, Math.floor((width - 8) / 7.6));  // letters of a bold name
  const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  // The tooltip at the pointer ------------------------------------------------------------------------------------------
  let hint = null;
  function tip(event, lines) {
    if (!hint) {
      hint = document.body.appendChild(document.createElement("div"));
      hint.className = "tip";
      hint.setAttribute("role", "status");
    }
    hint.replaceChildren(...lines.map(tipLine));
    hint.hidden = false;
    const box = hint.getBoundingClientRect(), room = document.documentElement.clientWidth;
    const left = event.clientX + 16 + box.width > room ? event.clientX - box.width - 12 : event.clientX + 16;
    hint.style.left = `${Math.max(4, left)}px`;
    hint.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
  }
  function tipLine(line) {
    const row = document.createElement("div");
    if (line.name !== undefined) {
      const mark = row.appendChild(document.createElement("i"));
      mark.style.background = charts.colour(line.name);
    }
    row.append(line.text);
    if (line.strong) row.className = "strong";
    return row;
  }
  const hide = () => { if (hint) hint.hidden = true; };
  charts.hideTip = hide;
  addEventListener("scroll", hide, { passive: true });

  // Common parts --------------------------------------------------------------------------------------------------------
  function sheet(element, chart, width, height) {
    const svg = d3.select(element).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width)
      .attr("height", height).attr("role", "img").attr("aria-label", charts.describe(chart));
    return svg;
  }
  charts.describe = (chart) => {
    const names = (chart.series || chart.groups || chart.bars || []).map((one) => one.name);
    const what = names.length ? `: ${names.slice(0, 12).join(", ")}` : "";
    return `${chart.title}${what}. The table below the chart has the numbers.`;
  };
  function xAxis(svg, scale, box, label, ticks) {
    const g = svg.append("g").attr("class", "axis").attr("transform", `translate(0,${box.bottom})`);
    const most = ticks || Math.max(2, (box.right - box.left) / 80), whole = scale.ticks(most).filter(Number.isInteger);
    const axis = d3.axisBottom(scale).ticks(most).tickFormat(short).tickSizeOuter(0);
    g.call(/^rounds?\b/.test(label) && whole.length ? axis.tickValues(whole) : axis);  // there is no round 1.5
    svg.append("text").attr("class", "label").attr("x", box.right).attr("y", box.bottom + 34).attr("text-anchor", "end").text(label);
  }
  function yAxis(svg, scale, box) {
    const g = svg.append("g").attr("class", "axis grid").attr("transform", `translate(${box.left},0)`);
    g.call(d3.axisLeft(scale).ticks(Math.max(3, (box.bottom - box.top) / 55)).tickFormat(short).tickSize(-(box.right - box.left)));
    g.select(".domain").remove();
  }
  // Labels at the ends of lines, moved apart until none overlap.
  function apart(labels, top, bottom, gap) {
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((one, i) => { one.at = Math.max(one.y, i ? labels[i - 1].at + gap : top); });
    for (let i = labels.length - 1; i >= 0; i--) {
      labels[i].at = Math.min(labels[i].at, i === labels.length - 1 ? bottom : labels[i + 1].at - gap);
    }
    return labels;
  }

  // Lines ---------------------------------------------------------------------------------------------------------------
  charts.line = function (element, chart, width) {
    const known = chart.series.map((one) => ({ ...one, points: points(one) })).filter((one) => one.points.length);
    const height = Math.round(Math.max(240, Math.min(380, width * 0.56)));
    const svg = sheet(element, chart, width, height);
    const longest = Math.min(18, d3.max(known, (one) => one.name.length) || 0);
    const box = { left: 46, right: width - Math.min(width * 0.36, 22 + longest * 7.9), top: 26, bottom: height - 44 };
    const x = d3.scaleLinear(span(known, "x"), [box.left, box.right]);
    const y = d3.scaleLinear(range(known, chart), [box.bottom, box.top]).nice();
    yAxis(svg, y, box);
    xAxis(svg, x, box, chart.x);
    svg.append("text").attr("class", "label").attr("x", 0).attr("y", 9).text(chart.y);
    if (chart.target !== undefined && chart.target !== null) target(svg, chart.target, y, box);
    known.forEach((one) => path(svg, one, x, y));
    svg.selectAll(".halo").raise();
    const ends = known.map((one) => ({ name: one.name, y: y(one.points.at(-1).y), x: x(one.points.at(-1).x) }));
    endLabels(svg, apart(ends, box.top + 4, box.bottom, 14), box, longest);
    follow(svg, known, x, y, box, chart);
    return svg.node();
  };
  function points(one) {
    const all = one.x.map((x, i) => ({ x, y: one.y[i], low: one.low ? one.low[i] : null, high: one.high ? one.high[i] : null }));
    return all.filter((point) => point.y !== null && point.x !== null);
  }
  function span(known, key) {
    const [low, high] = d3.extent(known.flatMap((one) => one.points.map((point) => point[key])));
    return low === high ? [low - 1, high + 1] : [low, high];
  }
  function range(known, chart) {
    const all = known.flatMap((one) => one.points.flatMap((point) => [point.y, point.low, point.high]));
    if (chart.target !== undefined) all.push(chart.target);
    if (chart.zero) all.push(0);
    const [low, high] = d3.extent(all.filter((value) => value !== null));
    const room = Math.abs(low) / 10 || 0.5;
    return low === high ? [low - room, high + room] : [low, high];
  }
  function path(svg, one, x, y) {
    const colour = charts.colour(one.name);
    if (one.low) {
      const area = d3.area().x((p) => x(p.x)).y0((p) => y(p.low)).y1((p) => y(p.high)).defined((p) => p.low !== null);
      svg.append("path").attr("class", "band").style("fill", colour).attr("d", area(one.points));
    }
    const line = d3.line().x((p) => x(p.x)).y((p) => y(p.y));
    svg.append("path").attr("class", "line").style("stroke", colour).style("stroke-dasharray", dash(one.name)).attr("d", line(one.points));
    const dots = one.dots || one.points.length < 3 ? one.points : one.points.slice(-1);
    svg.append("g").selectAll("circle").data(dots).join("circle").attr("cx", (p) => x(p.x)).attr("cy", (p) => y(p.y))
      .attr("r", 3).style("fill", colour);
  }
  function target(svg, value, y, box) {
    svg.append("line").attr("class", "target").attr("x1", box.left).attr("x2", box.right).attr("y1", y(value)).attr("y2", y(value));
    svg.append("text").attr("class", "label halo").attr("x", box.left + 4).attr("y", y(value) - 5).text(`target ${short(value)}`);
  }
  function endLabels(svg, labels, box, longest) {
    const g = svg.append("g").attr("class", "ends");
    labels.forEach((one) => {
      g.append("line").attr("x1", one.x + 4).attr("y1", one.y).attr("x2", box.right + 9).attr("y2", one.at).style("stroke", charts.colour(one.name));
      g.append("text").attr("x", box.right + 12).attr("y", one.at + 4).style("--own", charts.colour(one.name)).text(clip(one.name, longest))
        .append("title").text(one.name);
    });
  }
  function follow(svg, known, x, y, box, chart) {
    const rule = svg.append("line").attr("class", "rule").attr("y1", box.top).attr("y2", box.bottom).style("display", "none");
    const marks = svg.append("g").selectAll("circle").data(known).join("circle").attr("r", 4.5).attr("class", "mark")
      .style("fill", (one) => charts.colour(one.name)).style("display", "none");
    const closest = d3.bisector((point) => point.x).center;
    const area = svg.append("rect").attr("class", "catch").attr("x", box.left).attr("y", box.top)
      .attr("width", Math.max(0, box.right - box.left)).attr("height", box.bottom - box.top);
    area.on("pointermove", (event) => {
      const at = x.invert(d3.pointer(event)[0]);
      const found = known.map((one) => one.points[closest(one.points, at)]);
      const nearest = d3.least(found, (point) => Math.abs(point.x - at));
      rule.attr("x1", x(nearest.x)).attr("x2", x(nearest.x)).style("display", null);
      marks.attr("cx", (_, i) => x(found[i].x)).attr("cy", (_, i) => y(found[i].y)).style("display", null);
      const rows = known.map((one, i) => ({ name: one.name, y: found[i].y, text: `${one.name}: ${charts.number(found[i].y)}` }));
      tip(event, [{ text: `${chart.x} ${charts.number(nearest.x)}`, strong: true }, ...d3.sort(rows, (a, b) => b.y - a.y)]);
    });
    area.on("pointerleave", () => { rule.style("display", "none"); marks.style("display", "none"); hide(); });
  }

  // Strips: every client a dot ------------------------------------------------------------------------------------------
  const STRIP = 74;
  charts.strip = function (element, chart, width) {
    const height = chart.groups.length * STRIP + 50;
    const svg = sheet(element, chart, width, height);
    const box = { left: 8, right: width - 12, top: 6, bottom: height - 44 };
    const all = chart.groups.flatMap((group) => group.values).filter((value) => value !== null);
    const x = d3.scaleLinear(d3.extent(all), [box.left + 6, box.right - 6]).nice();
    if (x.domain()[0] === x.domain()[1]) x.domain([x.domain()[0] - 1, x.domain()[1] + 1]);
    xAxis(svg, x, box, chart.x);
    chart.groups.forEach((group, i) => strip(svg, group, box.top + i * STRIP, x, box, chart));
    return svg.node();
  };
  function strip(svg, group, top, x, box, chart) {
    const colour = charts.colour(group.name), middle = top + 42;
    const g = svg.append("g").attr("class", "strip");
    g.append("line").attr("class", "rail").attr("x1", box.left).attr("x2", box.right).attr("y1", middle).attr("y2", middle);
    const head = g.append("text").attr("class", "name").attr("x", box.left).attr("y", top + 14).style("--own", colour);
    head.text(clip(group.name, 34));
    const worst = group.named ? group.labels.slice(0, group.named).map((label, i) => `${label} ${short(d3.format(".3r")(group.values[i]))}`) : [];
    if (worst.length) {
      const said = `worst: ${worst.join(", ")}`, room = Math.floor((box.right - box.left) / 6.3) - Math.min(34, group.name.length) - 4;
      head.append("tspan").attr("class", "aside").attr("dx", 10).text(clip(said, Math.max(12, room)));
    }
    const dots = swarm(group, x, middle);
    const radius = dots.length > 150 ? 2.5 : 4;
    g.selectAll("circle").data(dots).join("circle").attr("cx", (d) => d.x).attr("cy", (d) => d.y).attr("r", radius)
      .attr("class", (d) => (d.i < group.named ? "dot named" : "dot")).style("fill", colour)
      .on("pointermove", (event, d) => tip(event, [{ name: group.name, text: group.labels[d.i], strong: true },
        { text: `${chart.x}: ${charts.number(group.values[d.i])}` },
        ...(group.examples && group.examples[d.i] !== null ? [{ text: `${charts.number(group.examples[d.i])} examples` }] : [])]))
      .on("pointerleave", hide);
    g.append("line").attr("class", "median").attr("x1", x(group.median)).attr("x2", x(group.median)).attr("y1", middle - 15).attr("y2", middle + 15);
  }
  // Dots with the same value are stacked vertically, within the height of the strip.
  function swarm(group, x, middle) {
    const places = new Map(), many = group.values.length > 150;
    const size = many ? 3 : 5.5, step = many ? 3.2 : 5.5, most = many ? 9 : 5;
    return group.values.map((value, i) => ({ value, i })).filter((d) => d.value !== null).map((d) => {
      const slot = Math.round(x(d.value) / size), count = places.get(slot) || 0;
      places.set(slot, count + 1);
      const off = Math.ceil((count % most) / 2) * (count % 2 ? 1 : -1);
      return { ...d, x: x(d.value), y: middle + off * step };
    });
  }

  // Sorted bars: a row per algorithm, a bar per client, all on one scale ------------------------------------------------
  const SORTED = 112;
  charts.sorted = function (element, chart, width) {
    const height = chart.groups.length * SORTED + 22;
    const svg = sheet(element, chart, width, height);
    svg.append("text").attr("class", "label").attr("x", 0).attr("y", 9).text(chart.y);
    const [low, high] = d3.extent([0, ...chart.groups.flatMap((group) => group.values)]);
    const y = d3.scaleLinear(low === high ? [-1, 1] : [low, high], [SORTED - 34, 0]).nice();
    chart.groups.forEach((group, i) => sortedRow(svg, chart, group, y, 22 + i * SORTED, width));
    return svg.node();
  };
  function sortedRow(svg, chart, group, y, top, width) {
    const g = svg.append("g").attr("transform", `translate(0,${top})`), body = g.append("g").attr("transform", "translate(0,20)");
    const box = { left: 46, right: width - 8, top: 0, bottom: SORTED - 34 }, colour = charts.colour(group.name);
    const head = g.append("text").attr("class", "name").attr("x", box.left).attr("y", 11).style("--own", colour).text(clip(group.name, 24));
    const room = Math.floor((box.right - box.left) / 6.3) - Math.min(24, group.name.length) - 3;
    head.append("tspan").attr("class", "aside").attr("dx", 10).text(clip(group.about, Math.max(12, room)));
    yAxis(body, y, { ...box, bottom: 110 });
    const x = d3.scaleBand(d3.range(group.values.length), [box.left, box.right]).paddingInner(group.values.length > 120 ? 0 : 0.15);
    body.selectAll("rect.bar").data(group.values).join("rect").attr("class", "bar").attr("x", (_, i) => x(i)).attr("width", Math.max(1, x.bandwidth()))
      .attr("y", (value) => Math.min(y(0), y(value))).attr("height", (value) => Math.abs(y(value) - y(0))).style("fill", colour);
    body.append("line").attr("class", "zero").attr("x1", box.left).attr("x2", box.right).attr("y1", y(0)).attr("y2", y(0));
    body.append("rect").attr("class", "catch").attr("x", box.left).attr("y", 0).attr("width", box.right - box.left).attr("height", box.bottom)
      .on("pointermove", (event) => {
        const i = Math.max(0, Math.min(group.values.length - 1, Math.floor((d3.pointer(event)[0] - box.left) / x.step())));
        tip(event, [{ name: group.name, text: group.labels[i], strong: true }, { text: `${chart.y}: ${charts.number(group.values[i])}` },
          { text: `${charts.number(group.after[i])}; ${charts.number(group.before[i])} under ${chart.against}` }]);
      }).on("pointerleave", hide);
  }

  // Differences by federation: a block per federation, in it a dot with its interval per algorithm -----------------------
  const LINE = 17, HEAD = 24;
  charts.forest = function (element, chart, width) {
    const tops = [0];
    chart.rows.forEach((row) => tops.push(tops.at(-1) + HEAD + LINE * Math.max(1, row.points.length)));
    const height = tops.at(-1) + 54, svg = sheet(element, chart, width, height);
    const names = chart.rows.flatMap((row) => row.points.map((point) => point.name.length));
    const box = { left: Math.min(width * 0.36, 16 + 7 * Math.min(18, d3.max(names) || 0)), right: width - 12, top: 4, bottom: height - 44 };
    const x = d3.scaleLinear(reach(chart.rows.flatMap((row) => row.points)), [box.left + 6, box.right - 6]).clamp(true);
    xAxis(svg, x, box, chart.x);
    svg.append("line").attr("class", "zero").attr("x1", x(0)).attr("x2", x(0)).attr("y1", box.top).attr("y2", box.bottom);
    chart.rows.forEach((row, i) => {
      svg.append("text").attr("class", "panel halo").attr("x", 0).attr("y", tops[i] + 16).text(clip(row.name, Math.floor(width / 7)));
      row.points.forEach((point, j) => interval(svg, chart, row, point, x, tops[i] + HEAD + LINE * (j + 0.5), box));
    });
    return svg.node();
  };
  // Intervals of few seeds can be hundreds of times wider than the differences: the axis shows the differences.
  function reach(points) {
    const [low, high] = d3.extent([0, ...points.map((point) => point.value)]), room = 3 * (high - low) || 1;
    const ends = points.flatMap((point) => [point.low, point.high]).filter((value) => value !== null);
    return [Math.max(low - room, d3.min([low, ...ends])), Math.min(high + room, d3.max([high, ...ends]))];
  }
  function interval(svg, chart, row, point, x, y, box) {
    const colour = charts.colour(point.name), g = svg.append("g").attr("class", "interval").style("color", colour);
    g.append("text").attr("class", "name").attr("x", box.left - 6).attr("y", y + 4).attr("text-anchor", "end").style("--own", colour).text(clip(point.name, fitting(box.left)));
    if (point.low !== null && point.high !== null) {
      g.append("line").attr("x1", x(point.low)).attr("x2", x(point.high)).attr("y1", y).attr("y2", y);
      [[point.low, -1], [point.high, 1]].forEach(([end, way]) => {
        const cut = end < x.domain()[0] || end > x.domain()[1];  // an arrow where the interval goes on
        const shape = cut ? `M${x(end) - 5 * way},${y - 4}L${x(end)},${y}L${x(end) - 5 * way},${y + 4}` : `M${x(end)},${y - 4}V${y + 4}`;
        g.append("path").attr("d", shape);
      });
    }
    g.append("circle").attr("cx", x(point.value)).attr("cy", y).attr("r", 4.5).attr("class", point.decided ? "decided" : "open");
    g.append("rect").attr("class", "catch").attr("x", 0).attr("y", y - LINE / 2).attr("width", box.right).attr("height", LINE)
      .on("pointermove", (event) => tip(event, [{ name: point.name, text: `${point.name}, ${row.name}: ${point.outcome}`, strong: true },
        { text: `${chart.x} ${charts.number(point.value)}` }, { text: `from ${charts.number(point.low)} to ${charts.number(point.high)}` }]))
      .on("pointerleave", hide);
  }

  // Average ranks on a line, the best at the left; bars join algorithms that are not told apart ---------------------------
  charts.ranks = function (element, chart, width) {
    const count = chart.points.length, half = Math.ceil(count / 2), step = 20;
    const edge = Math.min(width * 0.3, 14 + 7 * Math.min(18, d3.max(chart.points, (point) => point.name.length)));
    const box = { left: edge, right: width - edge }, axis = 62, bars = axis + 12, labels = bars + 9 * chart.groups.length + 14;
    const svg = sheet(element, chart, width, labels + half * step + 8);
    const x = d3.scaleLinear([1, count], [box.left, box.right]);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${axis})`)
      .call(d3.axisTop(x).tickValues(d3.range(1, count + 1)).tickFormat(d3.format("d")).tickSizeOuter(0));
    const end = Math.min(x(1 + chart.critical), box.right);
    svg.append("path").attr("class", "critical").attr("d", `M${x(1)},22V30M${x(1)},26H${end}M${end},22V30`);
    svg.append("text").attr("class", "label").attr("x", x(1)).attr("y", 14).text(`critical difference ${charts.number(chart.critical)}`);
    const at = Object.fromEntries(chart.points.map((point) => [point.name, x(point.rank)]));
    chart.groups.forEach((group, i) => {
      const [low, high] = d3.extent(group, (name) => at[name]);
      svg.append("line").attr("class", "joined").attr("x1", low - 4).attr("x2", high + 4).attr("y1", bars + 9 * i).attr("y2", bars + 9 * i);
    });
    chart.points.forEach((point, i) => {
      const left = i < half, y = labels + step * (left ? i : count - 1 - i) + 8, side = left ? box.left : box.right, colour = charts.colour(point.name);
      svg.append("path").attr("class", "lead").style("stroke", colour).attr("d", `M${at[point.name]},${axis}V${y}H${left ? side - 2 : side + 2}`);
      svg.append("text").attr("class", "name").attr("x", left ? side - 6 : side + 6).attr("y", y + 4).attr("text-anchor", left ? "end" : "start")
        .style("--own", colour).text(clip(point.name, fitting(edge))).append("title").text(`${point.name}: ${charts.number(point.rank)}`);
    });
    return svg.node();
  };

  // Heat maps -----------------------------------------------------------------------------------------------------------
  charts.heat = function (element, chart, width) {
    const count = chart.panels.length, across = count === 1 ? 1 : Math.max(1, Math.min(count, Math.floor(width / 300)));
    const each = Math.floor((width - (across - 1) * 16) / across);
    const rows = chart.rows.labels.length, cell = count === 1 ? 15 : 9;
    const inner = Math.max(count === 1 ? 140 : 90, Math.min(count === 1 ? 460 : 200, rows * cell));
    const down = Math.ceil(count / across), panelHeight = inner + 62, height = down * panelHeight + (count === 1 ? 2 : 14);
    const svg = sheet(element, chart, width, height);
    const shade = shades(element, chart);
    key(svg, shade, width, chart);
    chart.panels.forEach((panel, i) => {
      const left = (i % across) * (each + 16), top = (count === 1 ? 10 : 30) + Math.floor(i / across) * panelHeight;
      const edge = Math.min(92, 10 + 6.2 * d3.max(chart.rows.labels, (label) => label.replace(/^clients /, "").length));
      panelOf(svg, chart, panel, shade, { left: left + edge, right: left + each - 4, top: top + 16, bottom: top + 16 + inner });
    });
    return svg.node();
  };
  function shades(element, chart) {
    const style = getComputedStyle(element), stop = (name) => style.getPropertyValue(name).trim();
    const all = chart.panels.flatMap((panel) => panel.values.flat()).filter((value) => value !== null);
    let [low, high] = all.length ? d3.extent(all) : [0, 1];
    const signed = low < 0 && high > 0;
    if (signed) { high = Math.max(high, -low); low = -high; } else if (low > 0 && low < high / 2) { low = 0; }
    if (low === high) high = low + 1;
    const stops = (signed ? ["--d0", "--d1", "--d2"] : ["--h0", "--h1", "--h2", "--h3"]).map(stop);
    const ramp = d3.interpolateRgbBasis(stops), scale = (chart.root ? d3.scaleSqrt() : d3.scaleLinear()).domain([low, high]).clamp(true);
    return { low, high, ramp, of: (value) => ramp(scale(value)), empty: stop("--empty") };
  }
  const brief = d3.format(".3~g");
  function key(svg, shade, width, chart) {
    const size = Math.min(140, width / 3), left = width - size - 62, id = `key-${Math.random().toString(36).slice(2)}`;
    const gradient = svg.append("defs").append("linearGradient").attr("id", id);
    d3.range(0, 1.01, 0.1).forEach((t) => gradient.append("stop").attr("offset", t).attr("stop-color",
      shade.of(chart.root ? shade.low + t * t * (shade.high - shade.low) : shade.low + t * (shade.high - shade.low))));
    svg.append("rect").attr("x", left).attr("y", 3).attr("width", size).attr("height", 10).attr("rx", 2).attr("fill", `url(#${id})`);
    svg.append("text").attr("class", "label").attr("x", left - 6).attr("y", 12).attr("text-anchor", "end").text(`${chart.value} ${brief(shade.low)}`);
    svg.append("text").attr("class", "label").attr("x", left + size + 6).attr("y", 12).text(brief(shade.high));
  }
  function panelOf(svg, chart, panel, shade, box) {
    const rows = panel.values.length, columns = d3.max(panel.values, (row) => row.length) || 1;
    const wide = (box.right - box.left) / columns, tall = (box.bottom - box.top) / rows;
    if (panel.title && chart.panels.length > 1) svg.append("text").attr("class", "panel").attr("x", box.left).attr("y", box.top - 6).text(panel.title);
    svg.append("image").attr("x", box.left).attr("y", box.top).attr("width", box.right - box.left).attr("height", box.bottom - box.top)
      .attr("preserveAspectRatio", "none").style("image-rendering", "pixelated").attr("href", pixels(panel.values, columns, shade));
    sideLabels(svg, chart.rows.labels.slice(0, rows), box, tall);
    bottomLabels(svg, chart.columns, box, wide);
    const frame = svg.append("rect").attr("class", "frame").style("display", "none").attr("width", wide).attr("height", tall);
    svg.append("rect").attr("class", "catch cells").attr("x", box.left).attr("y", box.top).attr("width", box.right - box.left)
      .attr("height", box.bottom - box.top).on("pointermove", (event) => {
        const [px, py] = d3.pointer(event);
        const c = Math.min(columns - 1, Math.max(0, Math.floor((px - box.left) / wide)));
        const r = Math.min(rows - 1, Math.max(0, Math.floor((py - box.top) / tall)));
        frame.attr("x", box.left + c * wide).attr("y", box.top + r * tall).style("display", null);
        const value = panel.values[r][c];
        const said = value === null || value === undefined ? "did not take part" : `${chart.value} ${charts.number(value)}`;
        tip(event, [{ text: said, strong: true }, { text: chart.rows.labels[r] },
          { text: `${chart.columns.title} ${chart.columns.labels[c]}${panel.title && chart.panels.length > 1 ? `, ${panel.title}` : ""}` }]);
      }).on("pointerleave", () => { frame.style("display", "none"); hide(); });
  }
  function pixels(values, columns, shade) {
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = values.length;
    const pen = canvas.getContext("2d");
    values.forEach((row, r) => row.forEach((value, c) => {
      pen.fillStyle = value === null ? shade.empty : shade.of(value);
      pen.fillRect(c, r, 1, 1);
    }));
    return canvas.toDataURL();
  }
  function sideLabels(svg, labels, box, tall) {
    const every = Math.max(1, Math.ceil(13 / tall));
    svg.append("g").selectAll("text").data(labels).join("text").filter((_, i) => i % every === 0).attr("class", "label")
      .attr("x", box.left - 6).attr("y", (label) => box.top + (labels.indexOf(label) + 0.5) * tall + 3.5).attr("text-anchor", "end")
      .text((label) => clip(label.replace(/^clients /, ""), 14));
    svg.selectAll("g > text:empty").remove();
  }
  function bottomLabels(svg, columns, box, wide) {
    // A bin of rounds is labelled with its first round; the tooltip shows both ends.
    const names = columns.labels.map((label) => label.replace(/-.*/, "")), longest = d3.max(names, (label) => label.length) * 7 + 12, every = Math.max(1, Math.ceil(longest / wide));
    const g = svg.append("g");
    names.forEach((label, i) => {
      if (i % every === 0) g.append("text").attr("class", "label").attr("x", box.left + (i + 0.5) * wide).attr("y", box.bottom + 14).attr("text-anchor", "middle").text(label);
    });
    svg.append("text").attr("class", "label").attr("x", box.right).attr("y", box.bottom + 29).attr("text-anchor", "end").text(columns.title);
  }

  // Bars ----------------------------------------------------------------------------------------------------------------
  charts.bars = function (element, chart, width) {
    const row = 34, height = chart.bars.length * row + 30;
    const svg = sheet(element, chart, width, height);
    const edge = Math.min(width * 0.34, 16 + 7 * d3.max(chart.bars, (bar) => Math.min(18, bar.name.length)));
    const x = d3.scaleLinear([0, d3.max(chart.bars, (bar) => bar.value) || 1], [edge, width - 64]);
    chart.bars.forEach((bar, i) => {
      const y = i * row + 6;
      svg.append("rect").attr("x", edge).attr("y", y).attr("width", Math.max(1, x(bar.value) - edge)).attr("height", row - 14).attr("rx", 3).style("fill", charts.colour(bar.name));
      svg.append("text").attr("class", "name").attr("x", edge - 8).attr("y", y + 14).attr("text-anchor", "end").style("--own", charts.colour(bar.name)).text(clip(bar.name, 18));
      svg.append("text").attr("class", "value").attr("x", x(bar.value) + 6).attr("y", y + 14).text(charts.number(bar.value));
    });
    svg.append("text").attr("class", "label").attr("x", edge).attr("y", height - 8).text(chart.x);
    return svg.node();
  };

  // Reliability ---------------------------------------------------------------------------------------------------------
  charts.calibration = function (element, chart, width) {
    const side = Math.min(width, 420), height = side;
    const svg = sheet(element, chart, side, height);
    const box = { left: 40, right: side - 10, top: 26, bottom: height - 44 };
    const x = d3.scaleLinear([0, 1], [box.left, box.right]), y = d3.scaleLinear([0, 1], [box.bottom, box.top]);
    yAxis(svg, y, box);
    xAxis(svg, x, box, "confidence", 5);
    svg.append("text").attr("class", "label").attr("x", 0).attr("y", 9).text("accuracy");
    const total = d3.sum(chart.count) || 1, step = 1 / chart.bins;
    chart.accuracy.forEach((accuracy, i) => {
      if (accuracy === null) return;
      svg.append("rect").attr("x", x(i * step) + 1).attr("width", Math.max(1, x(step) - x(0) - 2)).attr("y", y(accuracy)).attr("height", y(0) - y(accuracy))
        .style("fill", charts.colour(chart.name)).style("fill-opacity", 0.35 + 0.65 * Math.sqrt(chart.count[i] / total))
        .on("pointermove", (event) => tip(event, [{ text: `${charts.number(chart.count[i])} examples`, strong: true },
          { text: `confidence ${charts.number(chart.confidence[i])}` }, { text: `accuracy ${charts.number(accuracy)}` }]))
        .on("pointerleave", hide);
    });
    svg.append("line").attr("class", "target").attr("x1", x(0)).attr("y1", y(0)).attr("x2", x(1)).attr("y2", y(1));
    svg.append("text").attr("class", "label").attr("x", box.left + 8).attr("y", box.top + 14).text(`ECE ${charts.number(chart.ece)}`);
    return svg.node();
  };

  // Pictures ------------------------------------------------------------------------------------------------------------
  charts.pictures = function (element, chart, width) {
    const edge = 56, cell = Math.max(48, Math.min(150, (width - edge) / chart.rounds.length)), tall = 46;
    const svg = sheet(element, chart, Math.max(width, edge + cell * chart.rounds.length), chart.classes.length * tall + 26);
    chart.rounds.forEach((round, c) => svg.append("text").attr("class", "label").attr("x", edge + c * cell).attr("y", 12).text(`round ${round}`));
    chart.classes.forEach((one, r) => svg.append("text").attr("class", "label").attr("x", 0).attr("y", 44 + r * tall).text(`class ${one}`));
    chart.cells.forEach((one) => svg.append("image").attr("href", one.image).attr("x", edge + chart.rounds.indexOf(one.round) * cell)
      .attr("y", 20 + chart.classes.indexOf(one.class) * tall).attr("width", cell - 6).attr("height", tall - 6)
      .attr("preserveAspectRatio", "xMinYMid meet").style("image-rendering", "pixelated"));
    return svg.node();
  };
})();
