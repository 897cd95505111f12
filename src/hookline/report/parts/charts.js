// Curves, drawn by uPlot. A chart is created when it comes into view, so that a page with hundreds opens fast.

const view = { smoothing: 0, log: false, events: true, charts: [], chosen: new Map(), differing: false };
const DASHES = new Map([["train", []], ["val", [7, 4]], ["test", [2, 3]]]); // a Map, because metrics may have any name
const KINDS = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat(); // steps are whole numbers

function dashes(kind, round) {
  // a second or third curve of the same colour gets other dashes
  if (!round) return kind;
  return kind.length ? kind.map((each) => each * (1 + round)) : [16, 3, ...Array(round - 1).fill([2, 3]).flat()];
}

function smooth(values, weight) {
  // an exponential average that does not start from zero
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return sum / total;
  });
}

class Chart {
  constructor(data, about, wide) {
    this.data = data;
    this.take(about);
    this.log = null; // follow the setting of the page
    this.hidden = new Set();
    this.several = data.runs.length > 1;
    this.at = el("span", { class: "at", "aria-live": "off" });
    this.holder = el("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event), onblur: () => this.move(-10),
      "aria-label": `${about.title}: ${this.series.map((each) => this.label(each)).join(", ")}. Arrow keys read values, plus and minus zoom.` });
    this.logButton = toggle("log", view.log, (on) => { this.log = on; this.build(); }, `${about.title}: logarithmic scale`);
    this.legend = el("div", { class: "legend", role: "group", "aria-label": `Curves of ${about.title}` });
    this.values = this.series.map((each, index) => this.entry(each, index));
    this.element = el("figure", { class: `card chart${wide ? " wide" : ""}` },
      el("div", { class: "bar" }, el("h3", { title: about.title }, about.title), el("span", { class: "title" }, this.at, this.logButton)), this.holder, this.legend);
    this.element.name = [about.title, ...this.series.map((each) => each.name)].join(" ").toLowerCase();
    this.height = wide ? 300 : 190;
  }

  take(about) {
    this.series = about.series;
    this.digits = this.series.map((each) => digitsOf(each.y));
  }

  label(each) {
    return this.several ? `${this.data.runs[each.run].name} · ${each.name}` : each.name;
  }

  look(each, index) {
    const names = [...new Set(this.series.map((one) => one.name))], place = names.indexOf(each.name);
    const stage = each.name.endsWith(" (epoch)") ? KINDS[3] : DASHES.get(each.name.split("/")[0]);
    // several runs: one colour per run, and dashes per curve; one run: one colour per curve
    const kind = stage || (this.several ? KINDS[place % 4] : []), coloured = this.several ? each.run : index;
    const again = this.several && !stage ? Math.floor(place / 4) : 0, rounds = this.several ? Math.ceil(names.length / 4) : 1;
    return { colour: `c${coloured % COLOURS}`, dash: dashes(kind, Math.floor(coloured / COLOURS) * rounds + again) };
  }

  entry(each, index) {
    const { colour: name, dash } = this.look(each, index);
    const width = dash.reduce((sum, part) => sum + part, 0) > 18 ? 48 : 20;
    const line = svg("line", { x1: 0, y1: 5, x2: width, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") });
    line.style.stroke = `var(--${name})`;
    const value = el("b", {}, number(each.y[each.y.length - 1], this.digits[index]));
    const button = toggle("", true, (on) => {
      if (on) this.hidden.delete(index); else this.hidden.add(index);
      this.build();
    });
    const swatch = svg("svg", { class: width > 20 ? "swatch long" : "swatch", viewBox: `0 0 ${width} 10`, "aria-hidden": "true" }, line);
    button.append(swatch, el("span", {}, this.label(each)), value);
    if (each.of > each.x.length) button.title = `${each.x.length} of ${each.of.toLocaleString("en")} values are drawn: the lowest and highest of each stretch`;
    this.legend.append(button);
    return value;
  }

  isLog() {
    // a curve without positive values has no logarithm
    return (this.log === null ? view.log : this.log) && this.series.some((each) => each.y.some((value) => value > 0));
  }

  joined() {
    const log = this.isLog();
    const tables = this.series.map((each) => {
      const shown = log ? each.y.map((value) => (value > 0 ? value : null)) : each.y;
      const soft = view.smoothing > 0 ? smooth(each.mean || each.y, view.smoothing) : each.y;
      return [each.x, shown, log ? soft.map((value) => (value > 0 ? value : null)) : soft];
    });
    return uPlot.join(tables.map(([x, y, soft]) => unique(x, y, soft)));
  }

  build() {
    if (!this.seen) return;
    const log = this.isLog();
    this.logButton.setAttribute("aria-pressed", String(log));
    const zoom = this.zoomed ? { ...this.zoomed } : null;
    if (this.plot) this.plot.destroy();
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
    const series = [{}];
    this.series.forEach((each, index) => {
      const { colour: name, dash } = this.look(each, index);
      const show = !this.hidden.has(index);
      const few = each.x.length < 40;
      series.push({ stroke: colour(name), width: 1, dash, alpha: 0.3, spanGaps: true, show: show && view.smoothing > 0, points: { show: false } });
      series.push({ stroke: colour(name), width: 2, dash, spanGaps: true, show, points: { show: few, size: 5, fill: colour(name) } });
    });
    this.plot = new uPlot({
      width: this.holder.clientWidth, height: this.height, series, legend: { show: false }, padding: [8, 24, 0, 0],
      scales: { x: { time: false }, y: log ? { distr: 3, range: decades } : { range: padded } },
      axes: [{ ...axis, size: 30, incrs: WHOLE, values: (_, ticks) => labels(ticks) },
        { ...axis, size: (_, texts) => Math.max(58, ...(texts || []).map((each) => 20 + 7 * each.length)), values: (_, ticks) => labels(ticks) }],
      cursor: { y: false, sync: { key: "steps", scales: ["x", null] }, drag: { x: true, y: false }, dataIdx: nearest, points: { size: 7 } },
      hooks: { setCursor: [() => this.read()], draw: [(plot) => this.mark(plot)], setScale: [(plot, key) => { if (key === "x") this.zoomed = { min: plot.scales.x.min, max: plot.scales.x.max }; }] },
    }, this.joined(), this.holder);
    if (zoom) this.plot.setScale("x", zoom);
  }

  update(about) {
    // the same curves with more values; keep the zoom
    this.take(about);
    if (this.plot) {
      const steps = this.plot.data[0], shown = this.plot.scales.x;
      const whole = !steps.length || shown.min === null || (shown.min <= steps[0] && shown.max >= steps[steps.length - 1]);
      this.plot.setData(this.joined(), whole);
      if (!whole) this.plot.redraw();
      this.read();
    } else this.series.forEach((each, index) => { this.values[index].textContent = number(each.y[each.y.length - 1], this.digits[index]); });
  }

  refresh() {
    // only the smoothing has changed
    if (!this.plot) return;
    this.plot.setData(this.joined(), false);
    this.series.forEach((_, index) => this.plot.setSeries(1 + 2 * index, { show: view.smoothing > 0 && !this.hidden.has(index) }));
    this.plot.redraw();
  }

  read() {
    const indices = this.plot.cursor.idxs;
    const over = indices && indices[0] !== null && indices[0] !== undefined && this.plot.cursor.left >= 0;
    this.at.textContent = over ? `step ${number(this.plot.data[0][indices[0]])}${this.near(this.plot.cursor.left)}` : "";
    this.series.forEach((each, index) => {
      const found = over ? indices[2 + 2 * index] : null;
      const value = found === null || found === undefined ? each.y[each.y.length - 1] : this.plot.data[2 + 2 * index][found];
      this.values[index].textContent = number(value, this.digits[index]);
    });
  }

  marked() {
    const shown = new Set(this.series.map((each) => each.run));
    return view.events ? this.data.events.filter((each) => each.step !== null && shown.has(each.run) && !["start", "end"].includes(each.kind)) : [];
  }

  near(left) {
    // the event under the cursor
    const found = this.marked().find((each) => Math.abs(this.plot.valToPos(each.step, "x") - left) < 5);
    return found ? ` · ${found.kind}: ${found.text}` : "";
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const event of this.marked()) {
      const x = plot.valToPos(event.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(event.level === "info" ? "soft" : event.level);
      ctx.globalAlpha = event.level === "info" ? 0.35 : 0.9;
      ctx.setLineDash(event.level === "bad" ? [] : [2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  move(left) {
    if (this.plot) this.plot.setCursor({ left, top: left < 0 ? -10 : this.plot.over.clientHeight / 2 });
  }

  key(event) {
    if (!this.plot) return;
    const wide = this.plot.over.clientWidth, at = this.plot.cursor.left < 0 ? wide / 2 : this.plot.cursor.left;
    const steps = { ArrowLeft: -wide / 60, ArrowRight: wide / 60, PageUp: -wide / 6, PageDown: wide / 6, Home: -wide, End: wide };
    if (event.key in steps) {
      this.at.setAttribute("aria-live", "polite");
      this.move(Math.min(wide - 1, Math.max(0, at + steps[event.key])));
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = this.plot.scales.x, centre = this.plot.posToVal(at, "x"), factor = event.key === "+" ? 0.5 : 2;
      const [first, last] = [this.plot.data[0][0], this.plot.data[0][this.plot.data[0].length - 1]];
      this.plot.setScale("x", { min: Math.max(first, centre - (centre - min) * factor), max: Math.min(last, centre + (max - centre) * factor) });
    } else if (event.key === "0") {
      this.plot.setData(this.plot.data);
    } else return;
    event.preventDefault();
  }
}

function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function decades(_, low, high) {
  if (low === null || high === null) return [0.1, 1];
  return low === high ? [low / 10, high * 10] : uPlot.rangeLog(low, high, 10, false);
}

function labels(ticks) {
  // as short as possible, while labels stay distinct and exact
  const known = ticks.filter((each) => each !== null), gap = Math.min(...known.slice(1).map((each, index) => Math.abs(each - known[index])));
  let digits = 4;
  while (digits < 15 && known.some((each) => Math.abs(Number(each.toPrecision(digits)) - each) > gap / 50)) digits++;
  return ticks.map((each) => (each === null ? "" : compact(each, digits)));
}

function compact(value, digits) {
  const size = Math.abs(value);
  if (digits > 4 && size >= 1e4 && size < 1e9) return String(Number(value.toPrecision(digits)));
  if (size >= 1e4) {
    for (const [unit, each] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (size >= each && size < each * 1e4) return `${Number((value / each).toPrecision(digits))}${unit}`;
  }
  const short = Number(value.toPrecision(digits));
  return size !== 0 && (size < 1e-2 || size >= 1e16) ? short.toExponential() : String(short);
}

function unique(x, y, soft) {
  // uPlot needs distinct steps: of several values at one step, keep the last
  let repeated = false;
  for (let index = 1; index < x.length; index++) if (x[index] === x[index - 1]) repeated = true;
  if (!repeated) return [x, y, soft];
  const last = x.map((each, index) => each !== x[index + 1]);
  return [x, y, soft].map((each) => each.filter((_, index) => last[index]));
}

function nearest(plot, series, index) {
  const values = plot.data[series];
  for (let away = 0; away < values.length; away++) {
    if (values[index - away] !== null && values[index - away] !== undefined) return index - away;
    if (values[index + away] !== null && values[index + away] !== undefined) return index + away;
  }
  return null;
}

const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting || entry.target.chart.seen) continue;
    entry.target.chart.seen = true;
    entry.target.chart.build();
  }
}, { rootMargin: "300px" });

function redrawAll() {
  // redraw the charts in view now, the others when they come into view
  for (const chart of view.charts) {
    if (!chart.seen) continue;
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    chart.seen = false;
    inView.unobserve(chart.holder);
    inView.observe(chart.holder);
  }
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    if (chart.plot && Math.abs(chart.plot.width - entry.contentRect.width) > 1) chart.plot.setSize({ width: entry.contentRect.width, height: chart.height });
  }
});

function addChart(data, about, wide) {
  const chart = new Chart(data, about, wide);
  chart.holder.chart = chart;
  view.charts.push(chart);
  inView.observe(chart.holder);
  resized.observe(chart.holder);
  return chart;
}

function dropChart(chart) {
  view.charts.splice(view.charts.indexOf(chart), 1);
  inView.unobserve(chart.holder);
  resized.unobserve(chart.holder);
  if (chart.plot) chart.plot.destroy();
}
