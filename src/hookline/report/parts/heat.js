// A layer, or a hook, per row; steps, or time, from left to right; brightness for the number.

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

function drawn(map, scale, rows, count, high) {
  const canvas = el("canvas", { width: count, height: rows, tabindex: "0", role: "img", "aria-label": map.label });
  canvas.style.height = `${rows * high}px`;
  const pixels = canvas.getContext("2d"), image = pixels.createImageData(count, rows);
  map.values.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    image.data.set([...(value === "x" ? NOT_FINITE : shade(scale.part(value))), 255], 4 * (y * count + x));
  }));
  pixels.putImageData(image, 0, 0);
  return canvas;
}

function heatMap(map) {
  // map: rows (names), values (per row, null where there is nothing), label, ends (texts), say(y, x), format
  const rows = map.rows.length, count = map.values[0].length, scale = heatScale(map.values);
  const high = Math.min(18, Math.max(4, Math.floor(460 / rows)));
  const canvas = drawn(map, scale, rows, count, high);
  const names = el("div", { class: "names", "aria-hidden": "true" });
  const skip = Math.ceil(12 / high);
  map.rows.forEach((name, index) => { if (index % skip === 0) names.append(el("span", { title: name }, name)); });
  names.style.gridTemplateRows = `repeat(${rows}, ${high}px)`;
  [...names.children].forEach((each, index) => { each.style.gridRow = `${index * skip + 1}`; });
  const said = el("p", { class: "at", "aria-live": "polite" }, "Point at a cell, or use the arrow keys, to read it.");
  let x = 0, y = 0;
  const read = () => { said.textContent = map.say(y, x); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    x = Math.min(count - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * count)));
    y = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
    read();
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    x = Math.min(count - 1, Math.max(0, x + move[0]));
    y = Math.min(rows - 1, Math.max(0, y + move[1]));
    read();
    event.preventDefault();
  });
  const ends = el("div", { class: "steps" }, map.ends.map((each) => el("span", {}, each)));
  return el("div", {}, said, el("div", { class: "heat" }, names, canvas, ends), ramp(scale, map),
    map.note ? el("p", { class: "soft small" }, map.note) : null);
}

function ramp(scale, map) {
  const strip = el("canvas", { width: 100, height: 1, "aria-hidden": "true" }), pixels = strip.getContext("2d");
  for (let place = 0; place < 100; place++) {
    pixels.fillStyle = `rgb(${shade(place / 99).join(" ")})`;
    pixels.fillRect(place, 0, 1, 1);
  }
  const broken = map.values.some((row) => row.includes("x"));
  return el("div", { class: "ramp" }, scale.none ? null : [map.format(scale.low), strip, `${map.format(scale.high)}${scale.log ? " (logarithmic)" : ""}`],
    broken ? [el("i", { "aria-hidden": "true" }), "not finite"] : null);
}

function layerMap(map) {
  const last = map.steps.length - 1;
  const say = (y, x) => {
    const value = map.values[y][x], until = map.steps[x + 1];
    const steps = until === undefined || until - map.steps[x] <= 1 ? `step ${number(map.steps[x])}` : `from step ${number(map.steps[x])}`;
    return `${map.rows[y]}, ${steps}: ${value === null ? "no value" : value === "x" ? "not finite" : number(value)}`;
  };
  return heatMap({ rows: map.rows, values: map.values, say, format: number,
    label: `${map.meaning} of ${map.rows.length} layers over ${map.steps.length} columns of steps. Arrow keys read values.`,
    ends: [`step ${number(map.steps[0])}`, ...(last > 0 ? [`step ${number(map.steps[last])}`] : [])],
    note: map.left_out ? `${map.left_out} further layers are not drawn.` : "" });
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
  return heatMap({ rows: about.lanes.map((each) => each.name), values, say, format: percent,
    label: `Time in ${about.lanes.length} hooks over ${about.columns} columns of time. Arrow keys read them.`,
    ends: ["0", seconds(about.columns * about.width)], note: about.left_out ? `${about.left_out} further hooks are not drawn.` : "" });
}

function choicePanel(label, maps, name, title, draw) {
  // one of several maps at a time; which one is remembered while the page is open
  const holder = el("div", {}), head = el("h3", {}, "");
  const show = (index) => {
    view.chosen[label] = index;
    head.textContent = title(maps[index]);
    holder.replaceChildren(draw(maps[index]));
  };
  const choice = el("select", { "aria-label": label, onchange: () => show(Number(choice.value)) }, maps.map((map, index) => el("option", { value: index }, name(map))));
  choice.value = Math.min(view.chosen[label] || 0, maps.length - 1);
  show(Number(choice.value));
  return el("div", { class: "card" }, el("div", { class: "controls" }, head, maps.length > 1 ? choice : null), holder);
}

function heatPanel(data) {
  const name = (map) => (data.runs.length > 1 ? `${data.runs[map.run].name} · ${map.family}` : map.family);
  return choicePanel("Heat map", data.heat, name, (map) => `${map.meaning} per layer`, layerMap);
}

function hookPanel(data) {
  const name = (about) => (data.runs.length > 1 ? `${data.runs[about.run].name} · rank ${about.rank}` : `rank ${about.rank}`);
  return choicePanel("Timeline", data.timeline, name, (about) => `Share of the time in each hook${data.timeline.length > 1 ? `, ${name(about)}` : ""}`, callMap);
}
