// Heat maps: one row per layer or hook; steps or time from left to right; brightness shows the value.

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const NOT_FINITE = [255, 45, 85];

function shade(part) {
  const place = Math.min(0.9999, Math.max(0, part)) * (RAMP.length - 1), low = Math.floor(place), share = place - low;
  return RAMP[low].map((each, index) => Math.round(each + (RAMP[low + 1][index] - each) * share));
}

function heatScale(values) {
  const finite = values.flat().filter((each) => typeof each === "number");
  const log = finite.every((each) => each >= 0) && finite.some((each) => each > 0);
  const used = log ? finite.filter((each) => each > 0) : finite;
  let low = Infinity, high = -Infinity;
  for (const each of used) { low = Math.min(low, each); high = Math.max(high, each); }
  const as = log ? Math.log10 : (each) => each;
  const part = (value) => (log && value <= 0 ? 0 : high > low ? (as(value) - as(low)) / (as(high) - as(low)) : 0.5);
  return { log, low, high, part, none: !used.length };
}

class HeatMap {
  // created once and then updated, so that the selected cell stays selected while the map grows
  constructor() {
    this.said = el("p", { class: "at", "aria-live": "polite" });
    this.names = el("div", { class: "names", "aria-hidden": "true" });
    this.canvas = el("canvas", { tabindex: "0", role: "img", onpointermove: (event) => this.point(event), onkeydown: (event) => this.key(event) });
    this.ends = el("div", { class: "steps" });
    this.ramp = el("div", { class: "ramp" });
    this.note = el("p", { class: "soft small" });
    this.element = el("div", {}, this.said, el("div", { class: "heat" }, this.names, this.canvas, this.ends), this.ramp, this.note);
    this.reading = null;
  }

  show(map, another) {
    // map: rows (names), values (per row, null where there is nothing), from(x) (where a column begins), label, ends (texts), say(y, x), format, note
    const rows = map.rows.length, count = map.values[0].length, scale = heatScale(map.values);
    if (another) this.reading = null;
    this.map = map;
    if (this.reading) {
      let x = 0;
      while (x + 1 < count && map.from(x + 1) <= this.reading.from) x++;
      this.reading = { ...this.reading, x, y: Math.min(this.reading.y, rows - 1) };
    }
    const high = Math.min(18, Math.max(4, Math.floor(460 / rows)));
    this.canvas.setAttribute("aria-label", map.label);
    this.canvas.style.height = `${rows * high}px`;
    this.paint(scale, rows, count);
    this.name(rows, high);
    fillWith(this.ends, map.ends.map((each) => el("span", {}, each)));
    this.ramp.replaceChildren(...ramp(scale, map));
    this.note.textContent = map.note;
    this.read();
  }

  paint(scale, rows, count) {
    this.canvas.width = count;
    this.canvas.height = rows;
    const pixels = this.canvas.getContext("2d"), image = pixels.createImageData(count, rows);
    this.map.values.forEach((row, y) => row.forEach((value, x) => {
      if (value === null) return;
      image.data.set([...(value === "x" ? NOT_FINITE : shade(scale.part(value))), 255], 4 * (y * count + x));
    }));
    pixels.putImageData(image, 0, 0);
  }

  name(rows, high) {
    const skip = Math.ceil(12 / high);
    fillWith(this.names, this.map.rows.filter((_, index) => index % skip === 0).map((name) => el("span", { title: name }, name)));
    this.names.style.gridTemplateRows = `repeat(${rows}, ${high}px)`;
    [...this.names.children].forEach((each, index) => { each.style.gridRow = `${index * skip + 1}`; });
  }

  read(x, y) {
    if (x !== undefined) {
      const column = Math.min(this.map.values[0].length - 1, Math.max(0, x));
      this.reading = { x: column, y: Math.min(this.map.rows.length - 1, Math.max(0, y)), from: this.map.from(column) };
    }
    const text = this.reading ? this.map.say(this.reading.y, this.reading.x) : "Point at a cell, or use the arrow keys, to read it.";
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.read(Math.floor((event.clientX - box.left) / box.width * this.canvas.width), Math.floor((event.clientY - box.top) / box.height * this.canvas.height));
  }

  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    const { x, y } = this.reading || { x: 0, y: 0 };
    this.read(x + move[0], y + move[1]);
    event.preventDefault();
  }
}

function ramp(scale, map) {
  const strip = el("canvas", { width: 100, height: 1, "aria-hidden": "true" }), pixels = strip.getContext("2d");
  for (let place = 0; place < 100; place++) {
    pixels.fillStyle = `rgb(${shade(place / 99).join(" ")})`;
    pixels.fillRect(place, 0, 1, 1);
  }
  const broken = map.values.some((row) => row.includes("x"));
  return [...(scale.none ? [] : [map.format(scale.low), strip, `${map.format(scale.high)}${scale.log ? " (logarithmic)" : ""}`]),
    ...(broken ? [el("i", { "aria-hidden": "true" }), "not finite"] : [])];
}

function layerMap(map) {
  const last = map.steps.length - 1;
  const say = (y, x) => {
    const value = map.values[y][x], until = map.steps[x + 1];
    const steps = until === undefined || until - map.steps[x] <= 1 ? `step ${number(map.steps[x])}` : `from step ${number(map.steps[x])}`;
    return `${map.rows[y]}, ${steps}: ${value === null ? "no value" : value === "x" ? "not finite" : number(value)}`;
  };
  return { rows: map.rows, values: map.values, say, format: (value) => number(value), from: (x) => map.steps[x],
    label: `${map.meaning} of ${map.rows.length} layers over ${map.steps.length} columns of steps. Arrow keys read values.`,
    ends: [`step ${number(map.steps[0])}`, ...(last > 0 ? [`step ${number(map.steps[last])}`] : [])],
    note: map.left_out ? `${map.left_out} further layers are not drawn.` : "" };
}

function callMap(about) {
  // the share of each column's time that a hook took
  const values = about.lanes.map(() => Array(about.columns).fill(null)), found = new Map();
  for (const cell of about.cells) {
    values[cell[0]][cell[1]] = Math.min(1, cell[2] / about.width);
    found.set(`${cell[0]} ${cell[1]}`, cell);
  }
  const say = (y, x) => {
    const cell = found.get(`${y} ${x}`), when = `${about.lanes[y].name}, ${seconds(x * about.width)} to ${seconds((x + 1) * about.width)}`;
    if (!cell) return `${when}: not called`;
    const longest = cell[5] < 0 ? "" : `, the longest ${seconds(cell[4])} in ${about.events[cell[5]]} at step ${number(cell[6])}`;
    return `${when}: ${number(cell[3])} calls, ${seconds(cell[2])}, ${percent(cell[2] / about.width)} of the time${longest}`;
  };
  return { rows: about.lanes.map((each) => each.name), values, say, format: percent, from: (x) => x * about.width,
    label: `Time in ${about.lanes.length} hooks over ${about.columns} columns of time. Arrow keys read them.`,
    ends: ["0", seconds(about.columns * about.width)], note: about.left_out ? `${about.left_out} further hooks are not drawn.` : "" };
}

function choicePanel(label, name, title, draw) {
  // show one of several maps; the choice is kept while the page is open
  const map = new HeatMap(), head = el("h3", {}, ""), choice = el("select", { "aria-label": label });
  let maps = [];
  const show = (another) => {
    const at = Math.max(0, maps.findIndex((each) => name(each) === view.chosen.get(label)));
    choice.value = at;
    head.textContent = title(maps[at]);
    map.show(draw(maps[at]), another);
  };
  choice.addEventListener("change", () => { view.chosen.set(label, name(maps[Number(choice.value)])); show(true); });
  const panel = el("div", { class: "card above" }, el("div", { class: "controls" }, head, choice), map.element);
  panel.take = (fresh) => {
    maps = fresh;
    fillWith(choice, maps.map((each, index) => el("option", { value: index }, name(each))));
    choice.classList.toggle("hidden", maps.length < 2);
    show(false);
    return panel;
  };
  return panel;
}

function heatPanel(data) {
  const name = (map) => (data.runs.length > 1 ? `${data.runs[map.run].name} · ${map.family}` : map.family);
  return lasting("heat", () => choicePanel("Heat map", name, (map) => `${map.meaning} per layer`, layerMap).take(data.heat), (panel) => panel.take(data.heat));
}

function hookPanel(data) {
  const name = (about) => (data.runs.length > 1 ? `${data.runs[about.run].name} · rank ${about.rank}` : `rank ${about.rank}`);
  const title = (about) => `Share of the time in each hook${data.timeline.length > 1 ? `, ${name(about)}` : ""}`;
  return lasting("calls", () => choicePanel("Timeline", name, title, callMap).take(data.timeline), (panel) => panel.take(data.timeline));
}
