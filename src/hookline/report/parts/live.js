// For a live page: updates that the server sends, and the switches of the running job.

const TOO_SOON = 500; // milliseconds
let said = null;

async function command(asked, busy) {
  // not `disabled`: the button would lose the keyboard focus
  if (busy.getAttribute("aria-disabled") === "true") return {};
  busy.setAttribute("aria-disabled", "true");
  let answer;
  said.className = "said small";
  said.textContent = `${asked.command} ${asked.hook || asked.file || ""}: requested, takes effect at the next step…`;
  try {
    answer = await (await fetch("control", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) })).json();
    said.classList.toggle("bad", Boolean(answer.error));
    said.textContent = answer.error || (answer.waiting ? `${answer.command}: pending until the next step`
      : answer.said ? `${answer.command}: ${answer.said}` : `${answer.command} ${answer.hook || ""}: done at step ${number(answer.step)}`);
  } catch (problem) {
    answer = { error: `${asked.command}: no answer (${problem.message})` };
    said.classList.add("bad");
    said.textContent = answer.error;
  }
  busy.removeAttribute("aria-disabled");
  return answer;
}

function stopButton() {
  // asks for confirmation, because a stop cannot be undone; a double click, or a key that is held down, does not confirm
  const button = el("button", { type: "button", class: "danger" });
  let sure = false, clicked = -Infinity, timer = 0;
  const ask = (back) => {
    sure = back;
    button.textContent = back ? "press again to stop the run" : "stop after this step";
  };
  button.addEventListener("click", (event) => {
    const soon = event.timeStamp - clicked < TOO_SOON;
    clicked = event.timeStamp;
    if (soon) return;
    clearTimeout(timer);
    if (sure) command({ command: "stop" }, button);
    else timer = setTimeout(() => ask(false), 5000);
    ask(!sure);
  });
  ask(false);
  return button;
}

function jobControls() {
  const save = el("button", { type: "button", onclick: () => command({ command: "checkpoint" }, save) }, "save a checkpoint");
  const check = el("button", { type: "button", onclick: () => command({ command: "validate" }, check) }, "validate now");
  const file = el("input", { type: "text", placeholder: "/path/to/probe.py:Probe", "aria-label": "Hook to attach, a file and a class", spellcheck: "false", autocomplete: "off" });
  const add = el("button", { type: "submit" }, "attach");
  const attach = async (event) => {
    event.preventDefault();
    const asked = file.value;
    if (!asked.trim()) return;
    const answer = await command({ command: "attach", file: asked.trim() }, add);
    if (answer.command && file.value === asked) file.value = "";
  };
  const form = el("form", { onsubmit: attach }, file, add);
  return el("div", { class: "controls" }, save, check, stopButton(), form);
}

function hookRow(hook) {
  const power = el("button", { type: "button", class: "switch", role: "switch", "aria-label": `Hook ${hook.name}` });
  power.addEventListener("click", () => command({ command: power.getAttribute("aria-checked") === "true" ? "disable" : "enable", hook: hook.name }, power));
  const often = el("input", { type: "text", "aria-label": `How often ${hook.name} is called`, placeholder: "always", autocomplete: "off" });
  const set = el("button", { type: "submit" }, "set");
  const change = async (event) => {
    event.preventDefault();
    const asked = often.value.trim();
    if (!asked) return;
    const answer = await command({ command: "every", hook: hook.name, interval: asked.replace(/^every /, "") }, set);
    if (answer.error && often.value.trim() === asked) often.value = often.known; // show the current interval again after a refusal
  };
  const form = el("form", { class: "every", onsubmit: change }, often, set);
  const cells = ["calls", "total", "worst", "share"].map(() => el("td", { class: "number" }));
  const leave = hook.attached ? el("button", { type: "button", "aria-label": `Detach ${hook.name}`, onclick: () => command({ command: "detach", hook: hook.name }, leave) }, "detach") : null;
  const row = el("tr", {}, el("th", { scope: "row" }, hook.name, el("div", { class: "soft small" }, hook.class)), el("td", {}, el("div", { class: "every" }, power, leave)), el("td", {}, form), cells);
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

function jobPart(data) {
  const job = data.job;
  if (!job.running) return section("job", "Job", el("p", { class: "soft small" }, `Read-only: ${job.why}`));
  const made = section("job", "Job", lasting("running", () => jobPanel().take(data.job), (panel) => panel.take(data.job)));
  made.className = "job";
  return made;
}

function jobPanel() {
  // created once for a job, so that typed text and answers stay; hooks are added and removed
  const line = el("p", {}), body = el("tbody", {}), caption = el("caption", {});
  said = el("p", { class: "said small", role: "status", "aria-live": "polite" });
  const heads = ["hook", "enabled", "how often", ["calls", "number"], ["total", "number"], ["worst", "number"], ["share of the time", "number"]];
  const head = el("tr", {}, heads.map((each) => (Array.isArray(each) ? el("th", { scope: "col", class: each[1] }, each[0]) : el("th", { scope: "col" }, each))));
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Hooks of the running job" },
    el("table", {}, caption, el("thead", {}, head), body));
  const panel = el("div", {}, line, jobControls(), said, table);
  panel.take = (job) => {
    fillWith(body, job.hooks.map((hook) => lasting(hook.name, () => hookRow(hook), (row) => row.update(hook))));
    fillWith(line, jobLine(job));
    const unmeasured = job.hooks.some((hook) => hook.calls === null) ? '; costs are not measured, because of audit={"costs": False}' : "";
    caption.textContent = `Hooks of the running job; a change takes effect at the next step, on all ranks${unmeasured}`;
    return panel;
  };
  return panel;
}

function jobLine(job) {
  const ends = (most, one) => ` · ends after ${number(most)} ${one}${most === 1 ? "" : "s"}`;
  const limit = job.max_steps > 0 ? ends(job.max_steps, "step") : job.max_epochs > 0 ? ends(job.max_epochs, "epoch") : "";
  const ranks = job.world_size > 1 ? ` · ${job.world_size} ranks` : "";
  return [el("span", { class: `badge ${job.stopping ? "warn" : "good"}` }, job.stopping ? "stopping" : job.status),
    document.createTextNode(` ${job.progress || job.position}${limit} · ${elapsed(job.elapsed)} · process ${job.pid}${ranks}`)];
}

function follow(data) {
  const sign = el("span", { class: "badge", role: "status" }, "connecting");
  document.getElementById("tools").append(sign);
  const say = (text, mood) => { sign.textContent = text; sign.className = `badge ${mood}`; };
  const feed = new EventSource(`feed?from=${encodeURIComponent(data.live)}`);
  const live = () => (data.stuck ? say("not updated", "bad") : say("live", "good"));
  feed.addEventListener("open", live);
  feed.addEventListener("error", () => say(feed.readyState === EventSource.CLOSED ? "ended" : "connection lost", "warn"));
  feed.addEventListener("update", (event) => {
    update(data, JSON.parse(event.data));
    live();
    document.title = `step ${number(data.runs[0].step)} · ${data.runs[0].name}`;
  });
}
