// The live page: a list of runs, and live charts of the ticked ones. One event stream carries the changes; the page does
// not poll. Names from runs are inserted as text, never as markup.
(function () {
  "use strict";
  const charts = window.fedalloyCharts;
  const MOST_LISTED = 300, MOST_LINES = 200, MOST_KEPT = 1200;
  const byId = (id) => document.getElementById(id);
  const state = { runs: new Map(), ticked: [], data: new Map(), styles: {}, canStop: false, since: 0, token: "", asked: new Set() };
  const figures = {};
  let source = null, planned = 0;

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  async function ask(url, options) {
    const answer = await fetch(url, options), value = await answer.json();
    if (!answer.ok) throw new Error(value.error || `the server answered ${answer.status}`);
    return value;
  }
  const query = (run) => `run=${encodeURIComponent(run)}`;

  // Texts -----------------------------------------------------------------------------------------------------------------
  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds < 90) return `${Math.ceil(seconds)} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
  }
  const score = (run) => (run.score === null || run.score === undefined ? "" : charts.number(Number(run.score.toPrecision(4))));
  function label(id) {
    const run = state.runs.get(id) || { name: id, seed: 0 };
    const same = state.ticked.filter((one) => (state.runs.get(one) || {}).name === run.name);
    if (same.length < 2) return run.name;
    const seeds = same.map((one) => (state.runs.get(one) || {}).seed);
    return new Set(seeds).size === seeds.length ? `${run.name}, seed ${run.seed}` : `${run.name}, ${id}`;
  }
  // One colour per algorithm; several runs of one differ by their dashes.
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  function giveStyles() {
    const met = {}, styles = {};
    for (const id of state.ticked) {
      const name = (state.runs.get(id) || {}).name, count = (met[name] = (met[name] ?? -1) + 1);
      const own = state.styles[name] || { slot: 0, dash: [] };
      styles[label(id)] = { slot: own.slot, dash: count ? DASHES[count % DASHES.length] : own.dash };
    }
    charts.setStyles(styles);
  }

  // The list --------------------------------------------------------------------------------------------------------------
  const rank = { running: 0, failed: 1, unreadable: 1, interrupted: 2, stopped: 2, finished: 3 };
  function matching() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...state.runs.values()].filter((run) => {
      const text = `${run.name} ${run.id} ${run.state} seed ${run.seed}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    return all.sort((a, b) => rank[a.state] - rank[b.state] || a.id.localeCompare(b.id, undefined, { numeric: true }));
  }
  // Lines and cards are updated in place: replacing one between press and release of a button would lose the click.
  const entries = new Map(), boxes = new Map();
  function keep(place, nodes) {
    const now = [...place.children];
    if (now.length !== nodes.length || now.some((node, i) => node !== nodes[i])) place.replaceChildren(...nodes);
  }
  const say = (node, text, className) => {
    if (node.textContent !== text) node.textContent = text;
    if (className !== undefined && node.className !== className) node.className = className;
  };
  function list() {
    const found = matching(), shown = found.slice(0, MOST_LISTED);
    keep(byId("runs"), shown.map(entry));
    for (const id of entries.keys()) if (!state.runs.has(id)) entries.delete(id);
    const more = found.length > shown.length ? `, the first ${shown.length} shown: search for the others` : "";
    say(byId("count"), state.runs.size ? `${found.length} of ${state.runs.size} runs${more}` : "No runs here yet. Start one: fedalloy run RECIPE");
  }
  function entry(run) {
    if (!entries.has(run.id)) entries.set(run.id, newEntry(run));
    const { item, box, name, points, said, where, progress } = entries.get(run.id);
    box.checked = state.ticked.includes(run.id);
    say(name, run.name);
    say(points, score(run));
    say(said, run.state, `state ${run.state}`);
    say(where, ` · seed ${run.seed} · ${run.id}`);
    progress.hidden = run.state !== "running";
    advance(progress, run);
    return item;
  }
  function newEntry(run) {
    const item = make("li"), row = item.appendChild(make("label", "run")), box = row.appendChild(make("input"));
    box.type = "checkbox";
    box.dataset.run = run.id;
    const name = row.appendChild(make("span", "name")), points = row.appendChild(make("span", "score"));
    const line = row.appendChild(make("span", "where")), said = line.appendChild(make("span")), where = line.appendChild(make("span"));
    return { item, box, name, points, said, where, progress: row.appendChild(make("progress")) };
  }
  function advance(node, run) {
    node.max = Math.max(1, run.rounds);
    node.value = run.round;
    node.setAttribute("aria-label", `round ${run.round} of ${run.rounds}`);
  }

  // Ticked runs -----------------------------------------------------------------------------------------------------------
  async function tick(ids) {
    state.ticked = ids.filter((id) => state.runs.has(id));
    history.replaceState(null, "", state.ticked.length ? `#${state.ticked.map(query).join("&")}` : location.pathname);
    list();
    await Promise.all(state.ticked.filter((id) => !state.data.has(id)).map(load));
    for (const id of state.data.keys()) if (!state.ticked.includes(id)) state.data.delete(id);
    show();
    listen();
  }
  async function load(id) {
    try {
      state.data.set(id, { ...(await ask(`/api/run?${query(id)}`)), trouble: "" });
    } catch (error) {
      state.data.set(id, { id, points: {}, rows: 0, events: [], reasons: {}, recipe: "", trouble: error.message });
    }
  }
  const shownData = () => state.ticked.map((id) => state.data.get(id)).filter(Boolean);

  function show() {
    giveStyles();
    const some = shownData();
    byId("advice").hidden = some.length > 0;
    byId("title").textContent = some.length === 0 ? "Runs" : some.length === 1 ? label(some[0].id) : `${some.length} runs compared`;
    byId("charts").hidden = some.length === 0;
    verdict(some);
    cards(some);
    pictures(some);
    events(some);
    recipes(some);
    if (some.length) { document.documentElement.dataset.drawn = "true"; performance.mark("fedalloy-drawn"); }
  }
  // Scores of unfinished runs decide nothing, and looking at them must not: a verdict is for the report.
  function verdict(some) {
    const runs = some.map((data) => state.runs.get(data.id) || data), names = new Set(runs.map((run) => run.name));
    const open = runs.filter((run) => run.state !== "finished" && run.state !== "failed").length;
    byId("verdict").hidden = names.size < 2;
    say(byId("verdict"), open ? `Running: no verdict yet, ${open} of ${runs.length} runs have not finished.`
      : "All of these have ended; fedalloy report on their folder says what they decide.");
  }
  function cards(some) {
    keep(byId("cards"), some.map((data) => card(state.runs.get(data.id) || data, data)));
    for (const id of boxes.keys()) if (!state.ticked.includes(id)) boxes.delete(id);
  }
  function card(run, data) {
    if (!boxes.has(run.id)) boxes.set(run.id, newCard(run));
    const { node, title, said, stop, progress, facts, reason, heard, trouble } = boxes.get(run.id);
    say(title, label(run.id));
    say(said, run.state, `state ${run.state}`);
    stop.hidden = run.state !== "running" || !state.canStop;
    stop.disabled = state.asked.has(run.id);
    say(stop, stop.disabled ? "Stopping after this round" : "Stop");
    advance(progress, run);
    say(facts, factsOf(run, data).join(" · "));
    say(reason, run.reason || "", run.state === "failed" ? "bad" : "soft");
    say(heard, heardText(data.participation));
    say(trouble, data.trouble || "");
    return node;
  }
  function newCard(run) {
    const node = make("article", "card"), head = node.appendChild(make("header"));
    node.dataset.run = run.id;
    const title = head.appendChild(make("h2")), said = head.appendChild(make("span")), stop = head.appendChild(make("button", "danger stop"));
    stop.type = "button";
    stop.dataset.stop = run.id;
    const progress = node.appendChild(make("progress"));
    const [facts, reason, heard, trouble] = ["soft", "soft", "soft", "bad"].map((kind) => node.appendChild(make("p", kind)));
    return { node, title, said, stop, progress, facts, reason, heard, trouble };
  }
  function factsOf(run, data) {
    const parts = [`round ${run.round} of ${run.rounds}`];
    if (run.score !== null && run.score !== undefined) parts.push(`${run.metric} ${score(run)}`);
    if (run.state === "running" && run.left !== null) parts.push(`about ${duration(run.left)} left`);
    if (data.seconds && data.seconds.mean !== null) parts.push(`${charts.number(Number(data.seconds.mean.toPrecision(2)))} s per round`);
    if (data.complete === false) parts.push("reading its records");
    return parts;
  }
  function heardText(heard) {
    if (!heard || heard.most === undefined) return "";
    const number = charts.number;
    return `clients contributed ${number(heard.least)} to ${number(heard.most)} times (median ${number(heard.median)}); did not answer ${number(heard.absent)} times, refused ${number(heard.dropped)}`;
  }

  // Charts ----------------------------------------------------------------------------------------------------------------
  const STATISTICS = { mean: "mean over clients", worst_served: "worst-served 10 % of clients", best_served: "best-served 10 % of clients", shared: "global model, mean over clients", pooled: "global model on the global test set" };
  function columnOf(metric, statistic) {
    if (statistic === "pooled") return `global/${metric}`;
    if (statistic === "shared") return `evaluation_global/${metric}/mean`;
    return `evaluation/${metric}/${statistic}`;
  }
  function curves(some) {
    const metrics = new Set(some.map((data) => (state.runs.get(data.id) || data).metric).filter(Boolean));
    for (const data of some) for (const name of Object.keys(data.points)) { const found = /^evaluation\/(.+)\/mean$/.exec(name); if (found) metrics.add(found[1]); }
    const known = new Set();
    const series = some.map((data) => {
      const rounds = [...new Set(Object.entries(data.points).filter(([name]) => /^(evaluation|global)/.test(name)).flatMap(([, line]) => line.x))].sort((a, b) => a - b);
      const values = {};
      for (const metric of metrics) for (const statistic of Object.keys(STATISTICS)) {
        const line = data.points[columnOf(metric, statistic)];
        if (!line) continue;
        const at = new Map(line.x.map((x, i) => [x, line.y[i]]));
        (values[metric] ||= {})[statistic] = { y: rounds.map((round) => at.get(round) ?? null) };
        known.add(statistic);
      }
      return { name: label(data.id), round: rounds, values };
    }).filter((one) => one.round.length);
    const statistics = Object.fromEntries(Object.entries(STATISTICS).filter(([key]) => known.has(key)));
    if (!series.length) return { id: "curves", kind: "line", title: "Scores of the clients", x: "round", y: "", series: [] };
    const first = some[0], target = first.target === null || first.target === undefined ? null : { metric: first.metric, value: first.target };
    return { id: "curves", kind: "curves", title: "Scores of the clients", metrics: [...metrics], statistics, axes: { round: "round" }, series, target };
  }
  const lines = (some, column) => some.filter((data) => data.points[column]).map((data) => ({ name: label(data.id), ...data.points[column] }));
  function draw(name, chart) {
    byId(name).hidden = !chart;
    if (!chart) return;
    if (figures[name]) figures[name].update(chart);
    else figures[name] = charts.figure(byId(name), chart);
  }
  function stripNote(strips) {
    const named = strips.some((strip) => strip.named) ? "; the worst served are named." : ".";
    const lost = strips.reduce((sum, strip) => sum + (strip.overflowed || 0), 0);
    return `A dot is a client at the last evaluation, the line the median${named}${lost ? ` ${lost} whose value is not finite cannot be drawn; they are the worst served.` : ""}`;
  }
  function pictures(some) {
    if (!some.length) return;
    draw("curves", curves(some));
    draw("loss", { id: "train-loss", kind: "line", title: "Training loss", x: "round", y: "training loss", series: lines(some, "train_loss") });
    draw("took-part", { id: "took-part", kind: "line", title: "Contributions used", x: "round", y: "clients", zero: true, series: lines(some, "counted") });
    const strips = some.filter((data) => data.clients);
    draw("clients", strips.length ? { id: "clients", kind: "strip", title: `${strips[0].metric} of every client`, x: strips[0].metric,
      groups: strips.map((data) => ({ name: label(data.id), ...data.clients })), note: stripNote(strips.map((data) => data.clients)) } : null);
    const weighed = some.find((data) => data.weights);
    draw("weights", weighed ? { ...weighed.weights, id: "weights", title: `Weights of the contributions: ${label(weighed.id)}` } : null);
  }

  // Drops and warnings ----------------------------------------------------------------------------------------------------
  function events(some) {
    const all = some.flatMap((data) => [
      ...data.events.map((event) => ({ run: label(data.id), ...event })),
      ...emptyRounds(data).map((round) => ({ run: label(data.id), round, client: "", text: "no contribution was used in this round" })),
    ]).sort((a, b) => b.round - a.round).slice(0, MOST_LINES);
    byId("log").hidden = some.length === 0;
    byId("events").replaceChildren(...all.map((event) => {
      const row = make("tr");
      [event.run, event.round, event.client, event.text].forEach((value) => row.append(make("td", "", String(value))));
      return row;
    }));
    const total = some.flatMap((data) => Object.entries(data.reasons)).map(([why, times]) => `${times} × ${why}`);
    byId("reasons").textContent = total.length ? `Refused contributions: ${total.join("; ")}` : all.length ? "" : "Nothing was dropped.";
  }
  function emptyRounds(data) {
    const line = data.points.counted;
    return line ? line.x.filter((_, i) => line.y[i] === 0) : [];
  }
  function recipes(some) {
    const open = new Set([...byId("recipes").querySelectorAll("details[open]")].map((one) => one.dataset.run));
    byId("recipes").replaceChildren(...some.filter((data) => data.recipe).map((data) => {
      const box = make("details");
      box.dataset.run = data.id;
      box.open = open.has(data.id);
      box.append(make("summary", "", `Recipe and environment: ${label(data.id)}`), make("pre", "", data.recipe), make("pre", "", JSON.stringify(data.environment, null, 2)));
      return box;
    }));
  }

  // Events ----------------------------------------------------------------------------------------------------------------
  function listen() {
    if (source) source.close();
    const runs = state.ticked.filter((id) => state.data.has(id) && !state.data.get(id).trouble);
    source = new EventSource(`/events?since=${state.since}${runs.map((id) => `&run=${encodeURIComponent(`${id}:${state.data.get(id).rows}`)}`).join("")}`);
    source.onopen = () => connection("live");
    source.onerror = () => connection("not connected: is fedalloy serve still running?", true);
    source.addEventListener("runs", (event) => { JSON.parse(event.data).forEach(changed); plan(); });
    source.addEventListener("added", (event) => { added(JSON.parse(event.data)); plan(); });
    source.addEventListener("anew", async (event) => { await load(JSON.parse(event.data).run); show(); listen(); });
    source.addEventListener("trouble", (event) => { const { run, text } = JSON.parse(event.data); if (state.data.has(run)) state.data.get(run).trouble = text; plan(); });
  }
  function connection(text, bad) {
    byId("connection").textContent = text;
    byId("connection").className = bad ? "bad" : "soft";
  }
  function changed(run) {
    if (run.gone) state.runs.delete(run.id);
    else { state.runs.set(run.id, run); if (run.state !== "running") state.asked.delete(run.id); }
  }
  function added(news) {
    const data = state.data.get(news.run);
    if (!data) return;
    const { points, run, ...rest } = news;
    Object.assign(data, rest);
    for (const [name, line] of Object.entries(points)) {
      const mine = (data.points[name] ||= { x: [], y: [] }), last = mine.x.at(-1) ?? -1;
      line.x.forEach((x, i) => { if (x > last) { mine.x.push(x); mine.y.push(line.y[i]); } });
      // Every other old point is dropped, so that watching a run for days does not fill the memory.
      if (mine.x.length > MOST_KEPT) { const keep = (_, i) => i % 2 === 0 || i > MOST_KEPT - 100; mine.x = mine.x.filter(keep); mine.y = mine.y.filter(keep); }
    }
  }
  // The page is drawn at most four times a second.
  function plan() {
    if (planned) return;
    planned = setTimeout(() => { planned = 0; list(); show(); }, 250);
  }

  // Stopping --------------------------------------------------------------------------------------------------------------
  async function stop(id) {
    const dialog = byId("ask");
    byId("ask-text").textContent = `${label(id)} (${id}) will end after the round in progress, with a checkpoint. Continue it later with: fedalloy run ${id} --resume`;
    byId("token").value = state.token;
    dialog.returnValue = "no";
    dialog.showModal();
    await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
    if (dialog.returnValue !== "yes") return;
    state.token = byId("token").value;
    try {
      await ask("/api/stop", { method: "POST", headers: { "Content-Type": "application/json", "X-Fedalloy-Token": state.token }, body: JSON.stringify({ run: id }) });
      state.asked.add(id);
      state.data.get(id).trouble = "";
    } catch (error) {
      state.token = "";
      state.data.get(id).trouble = `It was not stopped: ${error.message}`;
    }
    show();
  }

  // Start -----------------------------------------------------------------------------------------------------------------
  byId("search").addEventListener("input", list);
  byId("runs").addEventListener("change", (event) => {
    const id = event.target.dataset.run;
    if (id) tick(event.target.checked ? [...state.ticked, id] : state.ticked.filter((one) => one !== id));
  });
  document.addEventListener("click", (event) => { const asked = event.target.closest("[data-stop]"); if (asked) stop(asked.dataset.stop); });
  async function begin() {
    try {
      const told = await ask("/api/runs");
      Object.assign(state, { canStop: told.can_stop, since: told.since, styles: told.styles });
      told.runs.forEach(changed);
      byId("folder").textContent = told.folder;
      const wanted = new URLSearchParams(location.hash.slice(1)).getAll("run").filter((id) => state.runs.has(id));
      const running = [...state.runs.values()].filter((run) => run.state === "running").map((run) => run.id);
      await tick(wanted.length ? wanted : running.slice(0, 4));
      document.documentElement.dataset.ready = "true";
    } catch (error) {
      connection(`The runs cannot be read: ${error.message}`, true);
    }
  }
  begin();
})();
