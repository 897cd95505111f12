// Everything but curves: an overview of the runs, events, checkpoints, costs, configuration, samples.

function runCards(data) {
  return el("div", { class: data.runs.length > 1 ? "cards" : "cards one" }, data.runs.map((run, index) => {
    const rows = [["step", number(run.step)]];
    if (typeof run.epochs === "number") rows.push(["epochs", !run.is_inside ? number(run.epochs) : run.epochs ? `${number(run.epochs)}, and part of the next` : "in the first"]);
    if (run.began) rows.push(["began", clock(run.began)]);
    if (run.took) rows.push(["lasted", `${run.took}${run.pauses ? `, and ${run.pauses} of pauses` : ""}`]);
    for (const each of run.newest) rows.push([each.name, [rounded(each.last), each.min < each.last ? [" (lowest ", rounded(each.min), ")"] : null]]);
    if (run.checkpoints) rows.push(["checkpoints", number(run.checkpoints)]);
    rows.push(["records", run.missing_log ? "no log.jsonl" : `${number(run.records)}${run.superseded ? `, ${number(run.superseded)} superseded` : ""}`]);
    if (run.reason) rows.push(["reason", run.reason, "wide"]);
    // the job's own status is more reliable than a guess from its files
    const [mood, status] = data.job && data.job.running ? ["good", data.job.status] : [run.mood, run.status];
    const title = el("div", { class: "title" }, data.runs.length > 1 ? [chip(index), el("h3", {}, run.name)] : null, el("span", { class: `badge ${mood}` }, status));
    return el("section", { class: "card", "aria-label": `Run ${run.name}` }, title, el("dl", {}, rows.map(([key, value, kind]) => el("div", { class: kind || null }, el("dt", {}, key), el("dd", {}, value)))));
  }));
}

function known(key, cells) {
  return Object.assign(cells, { key });
}

function summaryTable(data) {
  const several = data.runs.length > 1;
  const at = (each, what) => el("td", { class: "number" }, rounded(each[what], digitsOf([each.min, each.max])), each[what] === undefined || what === "last" ? "" : el("span", { class: "soft" }, ` @ ${number(each[`${what}_step`])}`));
  const heads = ["metric", ...(several ? ["run"] : []), ["last", "number"], ["lowest @ step", "number"], ["highest @ step", "number"], ["values", "number"], ["not finite", "number"]];
  return table("All metrics, from all logged values; point at a number to see all of its digits", heads, data.summary.map((each) => known(`${each.run} ${each.name}`, [
    each.name, ...(several ? [runCell(data, each.run)] : []), at(each, "last"), at(each, "min"), at(each, "max"),
    [number(each.count), "number"], [each.bad ? number(each.bad) : "", "number"]])), true);
}

function timed(data) {
  return data.events.filter((each) => typeof each.time === "number");
}

function timeline(data) {
  if (timed(data).length < 2) return null;
  return lasting("time", () => {
    const holder = el("div", {}), card = el("div", { class: "card above" }, el("h3", {}, "Time since the run began"), holder);
    let width = 0;
    card.redraw = () => { if (width) fillWith(holder, [eventLanes(data, width)]); };
    new ResizeObserver(([entry]) => { width = Math.max(260, Math.round(entry.contentRect.width)); card.redraw(); }).observe(holder);
    return card;
  }, (card) => card.redraw());
}

function eventLanes(data, width) {
  // runs are aligned at their start, so that runs of different days can be compared; one lane per run and kind of event
  const found = timed(data), began = data.runs.map((_, run) => Math.min(...found.filter((each) => each.run === run).map((each) => each.time)));
  const lanes = [...new Set(found.map((each) => `${each.run} ${each.kind}`))].sort((one, other) => parseInt(one, 10) - parseInt(other, 10) || (one < other ? -1 : 1));
  const since = (each) => each.time - began[each.run];
  const last = Math.max(1, ...found.map(since));
  const left = Math.min(190, width * 0.34), right = width - 14, high = 24, bottom = lanes.length * high;
  const x = (value) => left + value / last * (right - left);
  const made = svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${bottom + 26}`, height: bottom + 26, role: "img", "aria-label": "Events over time; the table below lists them" });
  lanes.forEach((lane, index) => {
    const [run, kind] = [Number(lane.split(" ")[0]), lane.slice(lane.indexOf(" ") + 1)];
    const name = data.runs.length > 1 ? `${data.runs[run].name} · ${kind}` : kind, most = Math.floor((left - 12) / 7);
    const label = svg("text", { x: left - 12, y: index * high + 16, "text-anchor": "end" });
    label.textContent = name.length > most ? `${name.slice(0, most - 1)}…` : name;
    made.append(svg("line", { x1: left, x2: right, y1: index * high + 12, y2: index * high + 12 }), label);
  });
  for (const each of found) {
    const lane = lanes.indexOf(`${each.run} ${each.kind}`), title = svg("title");
    title.textContent = `${each.kind}${each.step === null ? "" : ` at step ${each.step}`}, after ${elapsed(since(each))}: ${each.text}`;
    const dot = svg("circle", { cx: x(since(each)), cy: lane * high + 12, r: 5.5 }, title);
    dot.style.fill = each.level === "info" ? `var(--c${data.runs.length > 1 ? each.run % COLOURS : 0})` : `var(--${each.level})`;
    made.append(dot);
  }
  const most = Math.max(2, (right - left) / 110);
  const apart = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200].find((each) => last / each <= most) || Math.ceil(last / most / 86400) * 86400;
  for (let value = 0; value <= last; value += apart) {
    const label = svg("text", { x: x(value), y: bottom + 18, "text-anchor": value && right - x(value) > 30 ? "middle" : value ? "end" : "start" });
    label.textContent = elapsed(value);
    made.append(label);
  }
  return made;
}

function eventTable(data) {
  const several = data.runs.length > 1;
  return table(several ? "Events of each run, in order of time" : "Events, in order of time", ["event", ...(several ? ["run"] : []), ["step", "number"], "what", "time"], data.events.map((each) => known(JSON.stringify([each.run, each.kind, each.step, each.time, each.text]), [
    [el("span", { class: `badge ${each.level}` }, each.kind), null], ...(several ? [runCell(data, each.run)] : []), [each.step === null ? "" : number(each.step), "number"],
    [each.text, "text"], [clock(each.time), "time"]])), true);
}

function checkpointTable(data) {
  const several = data.runs.length > 1;
  return table("Existing checkpoints, the newest first", ["checkpoint", ...(several ? ["run"] : []), ["step", "number"], ["epoch", "number"], "reason", "kept for", ["size", "number"], "saved"],
    data.checkpoints.map((each) => known(`${each.run} ${each.name}`, [each.name, ...(several ? [runCell(data, each.run)] : []), [number(each.step), "number"], [number(each.epoch), "number"], each.reason,
      each.score || "–", [bytes(each.bytes), "number"], [clock(each.saved), "time"]])), true);
}

function costTable(data, cost) {
  const last = cost.since === null ? "" : ` since the resume at step ${number(cost.since)}`; // each job counts its own
  const caption = `Time in hooks${data.runs.length > 1 ? ` of ${data.runs[cost.run].name}` : ""}${last}; the most expensive first`;
  const rows = [...cost.rows].sort((one, other) => (other.total || 0) - (one.total || 0));
  // a phone shows the first columns
  return table(caption, ["hook, event", ["total", "number"], ["share", "number"], ["calls", "number"], ["mean", "number"], ["worst", "number"]],
    rows.map((each) => known(`${each.hook} ${each.event}`, [[[each.hook, el("div", { class: "soft small" }, each.event)], ""], [seconds(each.total), "number"], [percent(each.share), "number"], [number(each.calls), "number"], [seconds(each.mean), "number"], [seconds(each.worst), "number"]])), true);
}

function changeTable(data, audit) {
  const caption = `What hooks changed${data.runs.length > 1 ? ` in ${data.runs[audit.run].name}` : ""}; the first change first`;
  if (!audit.rows.length) return el("p", { class: "soft small" }, `${data.runs.length > 1 ? `${data.runs[audit.run].name}: ` : ""}No hook changed anything.`);
  return table(caption, ["hook, event", "changed", ["calls", "number"], ["first step", "number"]],
    audit.rows.map((each) => known(`${each.rank} ${each.hook} ${each.event} ${each.kind}`, [[[each.rank ? `${each.hook}, rank ${each.rank}` : each.hook, el("div", { class: "soft small" }, each.event)], ""],
      [[each.kind, el("div", { class: "soft small" }, each.names)], "text"], [number(each.count), "number"], [number(each.first_step), "number"]])), true);
}

// ---- where the time went: one bar a run, and its parts in numbers

const TIME_COLOURS = { forward: 0, backward: 6, optimizer: 3, training: 7, "other training": 7, "waiting for data": 1, validation: 2, saving: 5, hooks: 4 };

function timeBars(data) {
  const several = data.runs.length > 1, parts = [...new Set(data.timings.flatMap((each) => each.parts.filter(([, took]) => took > 0).map(([name]) => name)))];
  const fill = (name) => `var(--c${TIME_COLOURS[name] ?? 7})`;
  const legend = el("div", { class: "legend still" }, parts.map((name) => { const mark = el("i"); mark.style.background = fill(name); return el("span", {}, mark, name); }));
  return el("div", { class: "card above" }, data.timings.map((each) => {
    const said = each.parts.filter(([, took]) => took > 0).map(([name, took]) => `${name} ${percent(took / each.total)}`).join(", ");
    const bar = svg("svg", { class: "share", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": `${elapsed(each.total)}: ${said}` });
    let at = 0;
    for (const [name, took] of each.parts) {
      const wide = Math.min(1000 - at, took / each.total * 1000), title = svg("title");
      title.textContent = `${name}: ${seconds(took)}, ${percent(took / each.total)}`;
      if (wide > 0) { const part = svg("rect", { x: at, y: 0, width: wide, height: 24 }, title); part.style.fill = fill(name); bar.append(part); }
      at += wide;
    }
    const since = each.since === null ? "" : ` since the resume at step ${number(each.since)}`;
    return el("div", { class: "shares" }, el("h3", {}, several ? [chip(each.run), ` ${data.runs[each.run].name}: `] : null, `${seconds(each.total)}${since}`), bar);
  }), legend);
}

function timeTable(data) {
  const several = data.runs.length > 1;
  return table("Seconds in each part; forward, backward and optimizer are estimated from sampled steps", ["part", ...(several ? ["run"] : []), ["time", "number"], ["share", "number"]],
    data.timings.flatMap((each) => each.parts.map(([name, took]) => known(`${each.run} ${name}`, [name, ...(several ? [runCell(data, each.run)] : []), [seconds(took), "number"], [percent(took / each.total), "number"]]))), true);
}

function configTable(data, rows, caption) {
  const several = data.runs.length > 1;
  const made = rows.map((each) => {
    const cells = known(each.key, [each.key, ...each.values.map((value) => [value === null ? "–" : value, "text"])]);
    cells.kind = several && new Set(each.values).size > 1 ? "differs" : view.differing ? "hidden" : null;
    return cells;
  });
  return table(caption, ["key", ...(several ? data.runs.map((run) => run.name) : ["value"])], made, true);
}

function configPanel(data) {
  const whole = configTable(data, data.config, data.runs.length > 1 ? "Configuration; differences are marked" : "Configuration");
  const only = toggle("only differences", view.differing, (on) => {
    view.differing = on;
    for (const row of whole.querySelectorAll("tbody tr")) row.classList.toggle("hidden", on && !row.classList.contains("differs"));
  });
  return [data.runs.length > 1 ? el("div", { class: "controls" }, only) : null, whole];
}

function textPanel(data) {
  const several = data.runs.length > 1;
  return el("div", { class: "samples" }, data.texts.map((each) => {
    const items = each.items.map((item) => {
      const key = JSON.stringify([item.step, item.text]);
      return [el("p", { class: "soft small", key }, item.step === null ? "" : `step ${number(item.step)}`), el("pre", { tabindex: "0", key }, item.text)];
    });
    const earlier = items.slice(1);
    const older = each.count > each.items.length ? ` (of ${number(each.count)} in all)` : "";
    return el("section", { class: "card", "aria-label": `Text ${each.tag}`, key: `${each.run} ${each.tag}` }, el("h3", {}, several ? [chip(each.run), ` ${data.runs[each.run].name} · `] : null, each.tag), items[0],
      earlier.length ? el("details", {}, el("summary", {}, `${earlier.length} earlier${older}`), earlier) : older ? el("p", { class: "soft small" }, `the newest${older}`) : null);
  }));
}

function picturePanel(data) {
  return el("div", { class: "pictures" }, data.pictures.map((each) => {
    const said = `${data.runs.length > 1 ? `${data.runs[each.run].name} · ` : ""}${each.tag}${each.step === null ? "" : `, step ${number(each.step)}`}`;
    return lasting(`${said} ${each.src}`, () => {
      const image = el("img", { alt: said, src: `data:image/png;base64,${each.src}`, decoding: "async", onload: () => { if (image.naturalWidth < 100) image.classList.add("tiny"); } });
      return el("figure", { class: "card" }, image, el("figcaption", {}, said));
    }, () => {});
  }));
}
