// The digests of a run: one field for each digested step.

const DIGEST_WORDS = {
  alone: ["digested", "var(--c0)"], equal: ["equal", "var(--c2)"], repeated: ["repeated, and equal", "var(--c6)"], differs: ["different", "var(--bad)"],
};

function digestStrip(data, strip) {
  const wide = 1000, high = 28, part = wide / strip.bins.length, several = data.runs.length > 1;
  const compared = strip.against ? ` to ${strip.against}` : "", found = strip.divergence;
  const counts = Object.keys(DIGEST_WORDS).map((state) => [state, strip.bins.filter((each) => each[3] === state).reduce((sum, each) => sum + each[2], 0)]).filter(([, count]) => count);
  const said = counts.map(([state, count]) => `${number(count)} ${DIGEST_WORDS[state][0]}`).join(", ");
  const picture = svg("svg", { class: strip.bins.length > 100 ? "share digests dense" : "share digests", viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", role: "img", "aria-label": `Digests: ${said}` });
  strip.bins.forEach(([first, last, count, state], index) => {
    const title = svg("title"), steps = first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}, ${number(count)} digests`;
    title.textContent = `${steps}: ${DIGEST_WORDS[state][0]}${state === "equal" ? compared : ""}`;
    const field = svg("rect", { x: index * part, y: 0, width: part, height: high }, title);
    field.style.fill = DIGEST_WORDS[state][1];
    picture.append(field);
  });
  const ends = el("div", { class: "steps" }, el("span", {}, `step ${number(strip.bins[0][0])}`), el("span", {}, `step ${number(strip.bins[strip.bins.length - 1][1])}`));
  const verdict = found ? el("p", { class: "verdict" }, el("span", { class: "badge bad" }, `${found.exact ? "diverges at" : "diverges before"} step ${number(found.step)}`), ` ${found.kind}: ${found.what}`)
    : strip.against ? el("p", { class: "verdict" }, el("span", { class: "badge good" }, "equal"), ` to ${strip.against}, in every digest that both have`) : null;
  return el("div", { class: "shares", key: `digests ${strip.run}` }, el("h3", {}, several ? [chip(strip.run), ` ${data.runs[strip.run].name}`] : "Digested steps", strip.against ? el("span", { class: "soft" }, ` against ${strip.against}`) : null), picture, ends, verdict);
}

function digestPart(data) {
  if (!data.digests.length) return null;
  const states = Object.keys(DIGEST_WORDS).filter((state) => data.digests.some((strip) => strip.bins.some((each) => each[3] === state)));
  const legend = el("div", { class: "legend still" }, states.map((state) => { const mark = el("i"); mark.style.background = DIGEST_WORDS[state][1]; return el("span", {}, mark, DIGEST_WORDS[state][0]); }));
  return section("digests", "Digests", el("div", { class: "card" }, data.digests.map((strip) => digestStrip(data, strip)), legend));
}
