// What only a live page has: updates that are pushed to it, and the switches of the running job.

let said = null;

async function command(asked, busy) {
  busy.disabled = true;
  said.className = "said small";
  said.textContent = `${asked.command} ${asked.hook || asked.file || ""}: asked for, carried out at the next step…`;
  try {
    const answer = await (await fetch("control", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) })).json();
    said.classList.toggle("bad", Boolean(answer.error));
    said.textContent = answer.error || (answer.waiting ? `${answer.command}: not done yet; it will be at the next step`
      : `${answer.command} ${answer.hook || ""}: done at step ${number(answer.step)}`);
  } catch (problem) {
    said.classList.add("bad");
    said.textContent = `${asked.command}: nobody answered (${problem.message})`;
  }
  busy.disabled = false;
}

function stopButton() {
  // asks back, because there is no way to undo it
  const button = el("button", { type: "button", class: "danger" }, "stop after this step");
  let sure = false;
  button.addEventListener("click", () => {
    if (sure) command({ command: "stop" }, button);
    sure = !sure;
    button.textContent = sure ? "press again to stop the run" : "stop after this step";
    if (sure) setTimeout(() => { sure = false; button.textContent = "stop after this step"; }, 5000);
  });
  return button;
}

function jobControls() {
  const save = el("button", { type: "button", onclick: () => command({ command: "checkpoint" }, save) }, "save a checkpoint");
  const file = el("input", { type: "text", placeholder: "/path/to/probe.py:Probe", "aria-label": "Hook to attach, a file and a class", spellcheck: "false", autocomplete: "off" });
  const add = el("button", { type: "submit" }, "attach");
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); if (file.value.trim()) command({ command: "attach", file: file.value.trim() }, add); } }, file, add);
  return el("div", { class: "controls" }, save, stopButton(), form);
}

function hookRow(hook) {
  const power = el("button", { type: "button", class: "switch", role: "switch", "aria-label": `Hook ${hook.name}` });
  power.addEventListener("click", () => command({ command: power.getAttribute("aria-checked") === "true" ? "disable" : "enable", hook: hook.name }, power));
  const often = el("input", { type: "text", "aria-label": `How often ${hook.name} is heard`, placeholder: "always", autocomplete: "off" });
  const set = el("button", { type: "submit" }, "set");
  const form = el("form", { class: "every", onsubmit: (event) => { event.preventDefault(); if (often.value.trim()) command({ command: "every", hook: hook.name, interval: often.value.trim().replace(/^every /, "") }, set); } }, often, set);
  const cells = ["calls", "total", "worst", "share"].map(() => el("td", { class: "number" }));
  const row = el("tr", {}, el("th", { scope: "row" }, hook.name, el("div", { class: "soft small" }, hook.class)), el("td", {}, power), el("td", {}, form), cells);
  row.update = (now) => {
    row.className = now.enabled ? "" : "off";
    power.setAttribute("aria-checked", String(now.enabled));
    power.setAttribute("aria-pressed", String(now.enabled));
    power.textContent = now.enabled ? "on" : "off";
    if (document.activeElement !== often && now.every !== often.known) often.value = often.known = now.every;
    [number(now.calls), seconds(now.total), seconds(now.worst), percent(now.share)].forEach((text, index) => { cells[index].textContent = text; });
  };
  row.update(hook);
  return row;
}

const drawnJob = { names: "", rows: new Map(), line: null };

function jobPart(data) {
  const job = data.job;
  drawnJob.names = jobNames(job);
  if (!job.running) {
    return section("job", "Job", el("p", { class: "soft small" }, `To look at, not to switch: ${job.why}`));
  }
  drawnJob.line = el("p", {});
  drawnJob.rows = new Map(job.hooks.map((hook) => [hook.name, hookRow(hook)]));
  said = el("p", { class: "said small", role: "status", "aria-live": "polite" });
  const heads = ["hook", "heard", "how often", ["calls", "number"], ["total", "number"], ["worst", "number"], ["share of the time", "number"]];
  const head = el("tr", {}, heads.map((each) => (Array.isArray(each) ? el("th", { scope: "col", class: each[1] }, each[0]) : el("th", { scope: "col" }, each))));
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Hooks of the running job" },
    el("table", {}, el("caption", {}, "Hooks of the running job; what is switched here takes effect at the next step, on all ranks"), el("thead", {}, head), el("tbody", {}, [...drawnJob.rows.values()])));
  const made = section("job", "Job", drawnJob.line, jobControls(), said, table);
  made.className = "job";
  updateJob(data);
  return made;
}

function jobNames(job) {
  return JSON.stringify([job.running, job.running ? job.hooks.map((each) => each.name) : job.why]);
}

function updateJob(data) {
  const job = data.job;
  if (!job || jobNames(job) !== drawnJob.names) return false;
  if (!job.running) return true;
  for (const hook of job.hooks) drawnJob.rows.get(hook.name).update(hook);
  const limit = job.max_steps > 0 ? ` of ${number(job.max_steps)} steps` : job.max_epochs > 0 ? ` of ${number(job.max_epochs)} epochs` : "";
  drawnJob.line.replaceChildren(el("span", { class: `badge ${job.stopping ? "warn" : "good"}` }, job.stopping ? "stopping" : job.status),
    ` ${job.position}${limit ? `,${limit}` : ""} · ${elapsed(job.elapsed)} · process ${job.pid}${job.world_size > 1 ? ` · ${job.world_size} ranks` : ""}`);
  return true;
}

function follow(data) {
  const sign = el("span", { class: "badge", role: "status" }, "connecting");
  document.getElementById("tools").append(sign);
  const say = (text, mood) => { sign.textContent = text; sign.className = `badge ${mood}`; };
  const feed = new EventSource(`feed?from=${encodeURIComponent(data.live)}`);
  feed.addEventListener("open", () => say("live", "good"));
  feed.addEventListener("error", () => say(feed.readyState === EventSource.CLOSED ? "ended" : "connection lost", "warn"));
  feed.addEventListener("update", (event) => {
    update(data, JSON.parse(event.data));
    document.title = `step ${number(data.runs[0].step)} · ${data.runs[0].name}`;
  });
}
