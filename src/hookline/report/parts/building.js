"use strict";
// Elements and texts. Data of a run is inserted as text, never as markup.

const COLOURS = 8;

function el(tag, given, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "key") made.key = value; // identifies the element, see updating.js
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== ""));
  return made;
}

function svg(tag, given, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(given || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (digits <= 5 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
  const whole = size >= 1 && size < 1e7 ? Math.floor(Math.log10(size)) + 1 : 0; // digits before the point are never rounded
  return String(Number(value.toPrecision(Math.max(digits, whole + 1))));
}

function rounded(value, digits = 5) {
  // a readable number of digits; all of them in the tooltip
  const text = number(value, digits);
  return typeof value !== "number" || text === number(value, 17) ? text : el("span", { title: String(value) }, text);
}

function digitsOf(values) {
  // enough digits to show the differences: values close to a million need more than values around zero
  let low = Infinity, high = -Infinity;
  for (const each of values) { low = Math.min(low, each); high = Math.max(high, each); }
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high > low ? Math.min(15, 5 + Math.max(0, Math.floor(Math.log10(size / (high - low))))) : 5;
}

function seconds(value) {
  if (typeof value !== "number") return "–";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  return value === 0 ? "0" : `${(value * 1e9).toFixed(0)} ns`;
}

function percent(value) {
  return typeof value === "number" ? `${Number((value * 100).toPrecision(3))} %` : "–";
}

function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}

function clock(value) {
  if (typeof value !== "number") return "";
  const at = new Date(value * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

function elapsed(value) {
  const left = Math.max(0, Math.round(value));
  if (left < 60) return `${left} s`;
  if (left < 3600) return `${Math.floor(left / 60)} min ${left % 60 ? `${left % 60} s` : ""}`.trim();
  if (left < 172800) return `${Math.floor(left / 3600)} h ${Math.floor(left / 60) % 60} min`;
  return `${(left / 86400).toFixed(1)} d`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function chip(run) {
  // eight colours, then again with gaps
  const made = el("span", { class: "chip", "aria-hidden": "true" }), name = `var(--c${run % COLOURS})`, round = Math.floor(run / COLOURS);
  const gap = Math.max(2, 8 - 2 * round);
  made.style.background = round ? `repeating-linear-gradient(90deg, ${name} 0 ${gap}px, transparent ${gap}px ${gap + 2}px)` : name;
  return made;
}

function runCell(data, run) {
  return el("td", { class: "time" }, chip(run), " ", data.runs[run].name);
}

function table(caption, heads, rows, tall) {
  // heads: a name, or [name, "number"]; a row: cells, each a text, an element, or [text, class]; the first cell names the row,
  // and `cells.key` identifies the row
  const head = el("tr", {}, heads.map((each) => el("th", { scope: "col", class: Array.isArray(each) ? each[1] : null }, Array.isArray(each) ? each[0] : each)));
  const body = rows.map((cells) => {
    const made = cells.map((cell, index) => {
      if (cell instanceof Element && cell.tagName === "TD") return cell;
      const [content, kind] = Array.isArray(cell) ? cell : [cell, null];
      return el(index === 0 ? "th" : "td", { scope: index === 0 ? "row" : null, class: kind }, content);
    });
    return el("tr", { class: cells.kind || null, key: cells.key }, made);
  });
  return el("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)));
}

function toggle(text, pressed, changed, label) {
  const made = el("button", { type: "button", "aria-pressed": String(pressed), "aria-label": label }, text);
  made.addEventListener("click", () => {
    const now = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(now));
    changed(now);
  });
  return made;
}
