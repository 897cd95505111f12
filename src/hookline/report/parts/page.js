// The page from its data.

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try { chosen = localStorage.getItem("hookline-theme") || "auto"; } catch { /* a local file may have no storage */ }
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
    try { localStorage.setItem("hookline-theme", chosen); } catch { /* without storage, the choice lasts until the page is closed */ }
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
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...content);
}

function slug(title) {
  return title.toLowerCase().replaceAll(" ", "-");
}

// ---- charts: created once, and updated while they show the same curves

const made = new Map();
let controls = null;

function planned(data) {
  // every chart in its section, with a key that identifies it
  return data.sections.map(({ title, charts }) => [title, charts.map((about, index) => {
    const wide = index === 0 && (title === "Loss and metrics" || charts.length === 1);
    return { about, wide, key: JSON.stringify([title, about.title, wide, about.series.map((each) => [each.run, each.name])]) };
  })]);
}

function chartPart(data) {
  const plan = planned(data), wanted = new Set(plan.flatMap(([, charts]) => charts.map((each) => each.key)));
  for (const [key, chart] of made) if (!wanted.has(key)) { dropChart(chart); made.delete(key); }
  if (data.heat.length && !plan.some(([title]) => title === "Gradients")) plan.push(["Gradients", []]);
  controls = controls || chartControls();
  const first = plan.find(([, charts]) => charts.length);
  return plan.map((part) => {
    const [title, charts] = part;
    const elements = charts.map(({ about, wide, key }) => {
      const draw = () => {
        if (made.has(key)) made.get(key).update(about);
        else made.set(key, addChart(data, about, wide));
        return made.get(key).element;
      };
      return lasting(key, draw, draw);
    });
    const heat = title === "Gradients" && data.heat.length ? heatPanel(data) : null, wide = charts.filter((each) => each.wide).length;
    return section(slug(title), title, part === first ? lasting("controls", () => controls, () => {}) : null, heat, elements.slice(0, wide), el("div", { class: "charts" }, elements.slice(wide)));
  });
}

// ---- the parts of the page, each with the data that it shows

function eventPart(data) {
  return data.events.length ? section("events", "Events", timeline(data), eventTable(data)) : null;
}

function costPart(data) {
  const none = missingLog(data) ? "Without a log there is no cost record." : data.runs.every((run) => run.is_over) ? 'The log has no cost record: no hook was called, or costs were not measured, because of audit={"costs": False}.'
    : "The log has no cost record yet; it is written when a run ends. In the training program, trainer.hooks.cost() returns calls and time of every hook and event at any time.";
  return section("cost", "Cost of hooks", data.cost.length ? data.cost.map((each) => costTable(data, each)) : el("p", { class: "soft small" }, none));
}

function configPart(data) {
  const versions = data.versions.length ? configTable(data, data.versions, "Versions") : null;
  if (versions) versions.classList.add("above");
  return data.config.length || versions ? section("configuration", "Configuration", versions, data.config.length ? configPanel(data) : null) : null;
}

function headPart(data) {
  return [el("h1", {}, data.runs.length > 1 ? `${data.runs.length} runs` : data.runs[0].name), runCards(data)];
}

function missingLog(data) {
  return data.runs.every((run) => run.missing_log) ? data.runs[0].missing_log : "";
}

function emptyPart(data) {
  const none = missingLog(data) || (data.runs.every((run) => run.is_over) ? "No metrics were logged." : "No metrics have been logged yet. Create the report again later.");
  return data.summary.length || data.heat.length ? null : el("p", {}, none);
}

function footPart(data) {
  return [...data.notes.map((each) => el("p", {}, each)), el("p", {}, `Created ${clock(data.made)} by Hookline ${data.version}, from ${data.runs.map((run) => run.path).join(", ")}.`)];
}

function stuckPart(data) {
  return data.stuck ? el("p", { class: "stuck", role: "alert" }, `This page is not updated. ${data.stuck}`) : null;
}

const PARTS = [
  { id: "head", where: "top", shows: ["runs", "summary", "job"], draw: headPart },
  { id: "stuck", where: "top", shows: ["stuck"], draw: stuckPart },
  { id: "empty", shows: ["summary", "heat"], draw: emptyPart },
  { id: "job", shows: ["job"], draw: (data) => (data.job ? jobPart(data) : null) },
  { id: "charts", shows: ["sections", "heat"], draw: chartPart },
  { id: "values", shows: ["summary"], draw: (data) => (data.summary.length ? section("values", "Values", summaryTable(data)) : null) },
  { id: "timeline", shows: ["timeline"], draw: (data) => (data.timeline.length ? section("timeline", "Timeline of hooks", hookPanel(data)) : null) },
  { id: "events", shows: ["events"], draw: eventPart },
  { id: "checkpoints", shows: ["checkpoints"], draw: (data) => (data.checkpoints.length ? section("checkpoints", "Checkpoints", checkpointTable(data)) : null) },
  { id: "time", shows: ["timings"], draw: (data) => (data.timings.length ? section("time", "Where the time went", timeBars(data), timeTable(data)) : null) },
  { id: "cost", shows: ["cost"], draw: costPart },
  { id: "audit", shows: ["changes"], draw: (data) => (data.changes.length ? section("audit", "Audit: what hooks changed", data.changes.map((each) => changeTable(data, each))) : null) },
  { id: "digests", shows: ["digests"], draw: digestPart },
  { id: "pictures", shows: ["pictures"], draw: (data) => (data.pictures.length ? section("pictures", "Pictures", picturePanel(data)) : null) },
  { id: "text", shows: ["texts"], draw: (data) => (data.texts.length ? section("text", "Text", textPanel(data)) : null) },
  { id: "configuration", shows: ["config", "versions"], draw: configPart },
  { id: "foot", where: "foot", shows: ["notes", "made"], draw: footPart },
];

function redraw(part, data) {
  fillWith(part.holder, [part.draw(data)].flat(Infinity).filter((each) => each !== null && each !== undefined));
}

function fillNav() {
  const titles = [...document.querySelectorAll("main section[id]")].map((each) => [each.id, each.querySelector("h2").textContent]);
  fillWith(document.querySelector("#tools nav"), titles.map(([id, title]) => el("a", { href: `#${id}`, key: id }, title)));
}

function update(data, changed) {
  Object.assign(data, changed);
  for (const part of PARTS) {
    if (part.shows.some((key) => key in changed)) redraw(part, data);
  }
  // without the paths: they would keep the scale, which new values are about to change
  if ("events" in changed) for (const chart of view.charts) if (chart.plot) chart.plot.redraw(false);
  fillNav();
}

function fill() {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("tools").append(el("nav", { "aria-label": "Parts of the report" }), themeButton());
  for (const part of PARTS) {
    part.holder = el("div", {});
    document.getElementById(part.where || "content").append(part.holder);
    redraw(part, data);
  }
  fillNav();
  return data;
}

const shown = fill();
if (shown.live) follow(shown);
