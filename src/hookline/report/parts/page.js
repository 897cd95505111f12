// The page from its data.

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try { chosen = localStorage.getItem("hookline-theme") || "auto"; } catch { /* a file may have no storage */ }
  const button = el("button", { type: "button" });
  const apply = () => {
    const theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[chosen];
    button.setAttribute("aria-label", `Colours: ${chosen}. Press to change.`);
    redrawAll();
  };
  button.addEventListener("click", () => {
    chosen = { auto: "light", light: "dark", dark: "auto" }[chosen];
    try { localStorage.setItem("hookline-theme", chosen); } catch { /* then it lasts as long as the page */ }
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
  return button;
}

function chartControls() {
  const shown = el("output", {}, "off");
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing", oninput: () => {
    view.smoothing = Number(slider.value);
    shown.textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
    for (const chart of view.charts) chart.refresh();
  } });
  const log = toggle("log scale", false, (on) => {
    view.log = on;
    for (const chart of view.charts) chart.log = null;
    redrawAll();
  });
  const events = toggle("events", true, (on) => { view.events = on; for (const chart of view.charts) if (chart.plot) chart.plot.redraw(); }, "Mark events in the charts");
  const reset = el("button", { type: "button", onclick: () => { for (const chart of view.charts) if (chart.plot) chart.plot.setData(chart.plot.data); } }, "reset zoom");
  const find = el("input", { type: "search", placeholder: "find a metric", "aria-label": "Find a metric", oninput: () => {
    const wanted = find.value.trim().toLowerCase();
    for (const chart of view.charts) chart.element.classList.toggle("hidden", !chart.element.name.includes(wanted));
  } });
  return el("div", { class: "controls" }, el("label", {}, "smoothing", slider, shown), log, events, reset, find);
}

function section(id, title, ...content) {
  const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...content);
  document.getElementById("content").append(made);
  document.querySelector("#tools nav").append(el("a", { href: `#${id}` }, title));
}

function slug(title) {
  return title.toLowerCase().replaceAll(" ", "-");
}

function fillCharts(data) {
  let controls = chartControls();
  const titles = data.sections.map((each) => each.title);
  if (data.heat.length && !titles.includes("Gradients")) data.sections.push({ title: "Gradients", charts: [] });
  for (const { title, charts } of data.sections) {
    const wide = title === "Loss and metrics" || charts.length === 1 ? charts.slice(0, 1) : [];
    const drawn = charts.map((each) => addChart(data, each, wide.includes(each)));
    const heat = title === "Gradients" && data.heat.length ? heatPanel(data) : null;
    if (heat) heat.style.marginBottom = "12px";
    section(slug(title), title, charts.length ? controls : null, heat, drawn.slice(0, wide.length),
      el("div", { class: "charts" }, drawn.slice(wide.length)));
    if (charts.length) controls = null;
  }
  if (data.summary.length) section("values", "Values", summaryTable(data));
}

function fillRest(data) {
  if (data.events.length) {
    const drawn = timeline(data);
    if (drawn) drawn.style.marginBottom = "12px";
    section("events", "Events", drawn, eventTable(data));
  }
  if (data.checkpoints.length) section("checkpoints", "Checkpoints", checkpointTable(data));
  section("cost", "Cost of hooks", data.cost.length ? data.cost.map((each) => costTable(data, each))
    : el("p", { class: "soft small" }, "The log has no cost record. In the program that trains, trainer.hooks.cost() tells calls and time of every hook and event at any moment."));
  if (data.pictures.length) section("pictures", "Pictures", picturePanel(data));
  if (data.texts.some((each) => each.items.length)) section("text", "Text", textPanel(data));
  const versions = data.versions.length ? configTable(data, data.versions, "Versions") : null;
  if (versions) versions.style.marginBottom = "12px";
  if (data.config.length || versions) section("configuration", "Configuration", versions, data.config.length ? configPanel(data) : null);
  document.getElementById("foot").append(...data.notes.map((each) => el("p", {}, each)), el("p", {}, `Made ${clock(data.made)} by Hookline ${data.version}, from ${data.runs.map((run) => run.path).join(", ")}.`));
}

function fill() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const several = data.runs.length > 1;
  document.getElementById("tools").append(el("nav", { "aria-label": "Parts of the report" }), themeButton());
  document.getElementById("top").append(el("h1", {}, several ? `${data.runs.length} runs` : data.runs[0].name), runCards(data));
  fillCharts(data);
  fillRest(data);
  if (!data.summary.length && !data.heat.length) {
    document.getElementById("content").prepend(el("p", {}, "No metrics have been logged yet. Make the report again when the run has."));
  }
}

fill();
