// A layer per row, steps from left to right, brightness for the number.

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

function heatMap(map) {
  const rows = map.rows.length, count = map.steps.length, scale = heatScale(map.values);
  const high = Math.min(18, Math.max(4, Math.floor(460 / rows)));
  const canvas = el("canvas", { width: count, height: rows, tabindex: "0", role: "img",
    "aria-label": `${map.meaning} of ${rows} layers over ${count} columns of steps. Arrow keys read values.` });
  canvas.style.height = `${rows * high}px`;
  const pixels = canvas.getContext("2d"), image = pixels.createImageData(count, rows);
  map.values.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    image.data.set([...(value === "x" ? NOT_FINITE : shade(scale.part(value))), 255], 4 * (y * count + x));
  }));
  pixels.putImageData(image, 0, 0);
  const names = el("div", { class: "names", "aria-hidden": "true" });
  const skip = Math.ceil(12 / high);
  map.rows.forEach((name, index) => { if (index % skip === 0) names.append(el("span", { title: name }, name)); });
  names.style.gridTemplateRows = `repeat(${rows}, ${high}px)`;
  [...names.children].forEach((each, index) => { each.style.gridRow = `${index * skip + 1}`; });
  const said = el("p", { class: "at", "aria-live": "polite" }, "Point at a cell, or use the arrow keys, to read it.");
  let x = 0, y = 0;
  const read = () => {
    const value = map.values[y][x], until = map.steps[x + 1];
    const steps = until === undefined || until - map.steps[x] <= 1 ? `step ${number(map.steps[x])}` : `from step ${number(map.steps[x])}`;
    said.textContent = `${map.rows[y]}, ${steps}: ${value === null ? "no value" : value === "x" ? "not finite" : number(value)}`;
  };
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
  const steps = el("div", { class: "steps" }, el("span", {}, `step ${number(map.steps[0])}`), count > 1 ? el("span", {}, `step ${number(map.steps[count - 1])}`) : null);
  return el("div", {}, said, el("div", { class: "heat" }, names, canvas, steps), ramp(scale, map),
    map.left_out ? el("p", { class: "soft small" }, `${map.left_out} further layers are not drawn.`) : null);
}

function ramp(scale, map) {
  const strip = el("canvas", { width: 100, height: 1, "aria-hidden": "true" }), pixels = strip.getContext("2d");
  for (let place = 0; place < 100; place++) {
    pixels.fillStyle = `rgb(${shade(place / 99).join(" ")})`;
    pixels.fillRect(place, 0, 1, 1);
  }
  const broken = map.values.some((row) => row.includes("x"));
  return el("div", { class: "ramp" }, scale.none ? null : [number(scale.low), strip, `${number(scale.high)}${scale.log ? " (logarithmic)" : ""}`],
    broken ? [el("i", { "aria-hidden": "true" }), "not finite"] : null);
}

function heatPanel(data) {
  const name = (map) => (data.runs.length > 1 ? `${data.runs[map.run].name} · ${map.family}` : map.family);
  const holder = el("div", {});
  const title = el("h3", {}, "");
  const show = (map) => {
    title.textContent = `${map.meaning} per layer`;
    holder.replaceChildren(heatMap(map));
  };
  const choice = el("select", { "aria-label": "Heat map", onchange: () => show(data.heat[Number(choice.value)]) },
    data.heat.map((map, index) => el("option", { value: index }, name(map))));
  show(data.heat[0]);
  return el("div", { class: "card" }, el("div", { class: "controls" }, title, data.heat.length > 1 ? choice : null), holder);
}
