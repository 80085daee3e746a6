// The page around the charts: theme, sortable tables, printing. Works on any page with these elements.
(function () {
  "use strict";
  const charts = window.fedalloyCharts, root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const memory = {
    get() { try { return localStorage.getItem("fedalloy-theme"); } catch { return null; } },
    set(value) { try { localStorage.setItem("fedalloy-theme", value); } catch { /* a page from a file may have no storage */ } },
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  function setTheme(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    document.querySelectorAll("[data-action=theme]").forEach((button) => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
    });
    charts.redraw();
  }
  charts.setTheme = setTheme;
  setTheme(memory.get());
  dark.addEventListener("change", () => setTheme());
  document.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-action]");
    if (!asked) return;
    if (asked.dataset.action === "theme") { const next = isDark() ? "light" : "dark"; memory.set(next); setTheme(next); }
    if (asked.dataset.action === "print") print();
    if (asked.dataset.action === "copy") copy(asked);
    if (asked.dataset.action === "sort") sort(asked);
  });

  async function copy(button) {
    const text = button.parentElement.querySelector("pre").textContent, said = button.textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select and copy by hand"; }
    setTimeout(() => { button.textContent = said; }, 1500);
  }

  function sort(button) {
    const head = button.closest("th"), table = button.closest("table"), column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    const key = (row) => { const cell = row.cells[column], given = cell.dataset.value; return given === undefined ? cell.textContent : given === "" ? null : Number(given); };
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      // Rows without a value stay at the end in both directions.
      if (x === null || y === null) return (x === null) - (y === null);
      return down * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
    table.tBodies[0].append(...rows);
    table.querySelectorAll("th[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
  }

  // For printing: the light theme, and charts that were not drawn yet.
  let before = null;
  addEventListener("beforeprint", () => { before = root.dataset.theme || ""; setTheme("light"); charts.drawAll(); });
  addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; setTheme(); });

  // A report has its charts in one element; other pages call fedalloyCharts directly.
  const data = document.getElementById("fedalloy-data");
  if (!data) return;
  const told = JSON.parse(data.textContent);
  charts.setStyles(told.styles);
  document.querySelectorAll("[data-chart]").forEach((place) => {
    charts.figure(place, told.charts[place.dataset.chart], { start: place.dataset.start ? JSON.parse(place.dataset.start) : {} });
  });
  document.querySelectorAll("select[data-shows]").forEach((select) => {
    const show = (asked) => document.querySelectorAll(`[data-group="${select.dataset.shows}"]`).forEach((one) => {
      one.hidden = one.dataset.member !== select.value;
      if (asked && !one.hidden) charts.show(one);
    });
    select.addEventListener("change", () => show(true));
    show(false);
  });
  root.dataset.ready = "true";
})();
