"use strict";
const element = (name) => document.getElementById(name);

// ---- The settings: each is a word of the command line, with the steps of its slider

const upTo = (most) => Array.from({ length: most }, (_, i) => i + 1);
const FIELDS = [
  { group: "Plan" },
  { name: "schedule", label: "schedule", usual: "1f1b" },
  { name: "ranks", label: "ranks, p", usual: "8", option: "--ranks", steps: [...upTo(16), 20, 24, 32] },
  { name: "microbatches", label: "microbatches, m", usual: "16", option: "--microbatches", steps: [...upTo(32), 40, 48, 56, 64, 80, 96, 128] },
  { name: "stages", label: "stages of a rank", usual: "2", option: "--stages-per-rank", steps: upTo(8), has: "has_stages" },
  { name: "slices", label: "slices of a microbatch", usual: "1", silent: "1", option: "--slices", steps: upTo(8), has: "has_slices" },
  { group: "Budget" },
  { name: "limit", label: "of each rank", usual: "no", choices: { no: "schedule's own", slots: "in microbatches", bytes: "in bytes", lowest: "lowest in bytes" } },
  { name: "slots", label: "microbatches", usual: "5", option: "--slots", steps: upTo(32), when: "slots" },
  { name: "budget", label: "device memory", usual: "16GiB", option: "--budget", steps: upTo(96), unit: "GiB", when: "bytes" },
  { group: "Costs" },
  { name: "of", label: "costs are of", usual: "rank", choices: { rank: "a whole rank", stage: "a stage" } },
  { name: "forward", label: "forward", usual: "30ms", option: "--forward", steps: [1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200], unit: "ms" },
  { name: "backward", label: "backward", usual: "", hint: "two forwards", option: "--backward", steps: [2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 400], unit: "ms" },
  { name: "saved", label: "saved for the backward", usual: "1.5GiB", option: "--saved", steps: [0.125, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8], unit: "GiB" },
  { name: "output", label: "sent to the next stage", usual: "32MiB", option: "--output", steps: [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512], unit: "MiB" },
  { name: "static", label: "weights and what stays", usual: "8GiB", option: "--static", steps: [0, ...upTo(16), 20, 24, 32, 40, 48, 64], unit: "GiB" },
  { group: "Link between ranks" },
  { name: "bandwidth", label: "bandwidth", usual: "50GB/s", option: "--bandwidth", hint: "no limit", steps: [1, 2, 5, 10, 12.5, 16, 20, 25, 32, 40, 50, 64, 100, 150, 200, 300, 450, 900], unit: "GB/s" },
  { name: "latency", label: "latency", usual: "10us", option: "--latency", hint: "0", steps: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], unit: "us" },
];
const SETTINGS = FIELDS.filter((field) => field.name);
const NAMES = ["First plan", "Second plan"];
const first = () => Object.fromEntries(SETTINGS.map(({ name, usual }) => [name, usual]));
// All that the page shows follows from this: the first plan's settings, and those of the second that differ from it.
const state = { first: first(), second: { schedule: "balanced_1f1b" }, compares: true };
let schedules = [];

const setting = (index) => (index ? { ...state.first, ...state.second } : state.first);
const shown = () => (state.compares ? [0, 1] : [0]);
const rule = (index) => schedules.find(({ name }) => name === setting(index).schedule);

/** Whether a plan has a setting: some schedules have no slices, and each kind of budget has a field of its own. */
function applies(field, index) {
  if (field.has) return Boolean(rule(index)?.[field.has]);
  return !field.when || field.when === setting(index).limit;
}

/** The words behind `bpipe simulate` that ask for a plan. */
function words(index) {
  const chosen = setting(index), found = [chosen.schedule];
  for (const field of SETTINGS) {
    const value = chosen[field.name].trim();
    if (field.option && value && value !== field.silent && applies(field, index)) found.push(field.option, value);
  }
  if (chosen.limit === "lowest") found.push("--budget", "lowest");
  if (chosen.of === "rank") found.push("--per-rank");
  return found;
}

// ---- The link: what is behind the # says all settings; those of the second plan begin with "2."

function toHash() {
  const pairs = [...Object.entries(state.first), ...Object.entries(state.second).map(([name, value]) => [`2.${name}`, value])];
  return `#${new URLSearchParams(state.compares ? pairs : [...pairs, ["compare", "no"]])}`;
}

function fromHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (![...given].length) return;
  const isOffered = (name, value) => name !== "schedule" || schedules.some((one) => one.name === value);
  const taken = (prefix) => SETTINGS.filter(({ name }) => given.has(prefix + name) && isOffered(name, given.get(prefix + name))).map(({ name }) => [name, given.get(prefix + name)]);
  Object.assign(state, { first: { ...first(), ...Object.fromEntries(taken("")) }, second: Object.fromEntries(taken("2.")), compares: given.get("compare") !== "no" });
}

// ---- The form

function build() {
  for (const field of FIELDS) {
    const row = element("fields").insertRow(), name = document.createElement("th");
    name.scope = field.group ? "rowgroup" : "row";
    name.textContent = field.group ?? field.label;
    row.append(name);
    if (field.group) { row.className = "group"; name.colSpan = 3; continue; }
    field.row = row;
    field.cells = NAMES.map((plan, index) => cell(field, index, row.insertCell(), `${plan}: ${field.label}`));
  }
}

function cell(field, index, td, label) {
  const input = document.createElement(field.steps ? "input" : "select");
  input.setAttribute("aria-label", label);
  td.append(input);
  const found = { td, input };
  if (!field.steps) {
    const choices = field.choices ?? Object.fromEntries(schedules.map(({ name }) => [name, name]));
    for (const [value, text] of Object.entries(choices)) input.append(new Option(text, value));
    input.addEventListener("input", () => change(field, index, input.value));
    return found;
  }
  Object.assign(input, { placeholder: field.hint ?? "", autocomplete: "off", spellcheck: false });
  input.addEventListener("input", () => change(field, index, input.value, 250));
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: field.steps.length - 1, step: 1 });
  slider.setAttribute("aria-label", `${label}, slider`);
  slider.addEventListener("input", () => change(field, index, `${field.steps[slider.value]}${field.unit ?? ""}`));
  td.append(slider);
  return { ...found, slider };
}

/** Take a new value; the second plan follows the first where it has the same. */
function change({ name }, index, value, patience = 0) {
  if (!index) state.first[name] = value;
  else if (value === state.first[name]) delete state.second[name];
  else state.second[name] = value;
  if (name === "schedule" && rule(index)) return change({ name: "slices" }, index, `${rule(index).slices}`);
  update(patience);
}

/** Write the settings into the form, and ask for their plans. */
function update(patience = 0) {
  element("compare").checked = state.compares;
  for (const field of SETTINGS) {
    field.row.hidden = !shown().some((index) => applies(field, index));
    field.cells.forEach((one, index) => fill(field, index, one));
  }
  ask(patience);
}

function fill(field, index, { td, input, slider }) {
  const value = setting(index)[field.name], isOther = index === 1 && field.name in state.second;
  td.className = index ? (isOther ? "other" : "follows") : "";
  for (const part of td.children) part.hidden = (index && !state.compares) || !applies(field, index);
  if (document.activeElement !== input || !field.steps) input.value = value;
  if (!slider) { input.title = field.name === "schedule" ? about(rule(index)) : ""; return; }
  const number = parseFloat(value), nearest = field.steps.reduce((best, step, i) => (Math.abs(step - number) < Math.abs(field.steps[best] - number) ? i : best), 0);
  slider.value = nearest;
  slider.setAttribute("aria-valuetext", value || field.hint);
  // One number would replace those of all stages; and the slider has one unit.
  slider.disabled = value.includes(",") || (value !== "" && !value.endsWith(field.unit ?? ""));
}

function about(found) {
  return found ? `${found.title}\nmost microbatches on a rank: ${found.memory}\nbubble: ${found.bubble}\nmicrobatches: ${found.takes}` : "";
}

// ---- Python, in a worker: one question at a time, and of those that wait only the latest

const PATIENCE = 8000; // milliseconds that a question may take when another one waits: then Python starts again
const python = { worker: null, calls: new Map(), next: 0 };

function start() {
  // A module from a data: URL is the one kind of worker that runs Pyodide in a page that was opened from disk too.
  python.worker = new Worker(`data:text/javascript,${encodeURIComponent(RUNTIME.worker)}`, { type: "module" });
  python.worker.addEventListener("message", ({ data }) => {
    python.calls.get(data.id)?.(data);
    python.calls.delete(data.id);
  });
  python.worker.addEventListener("error", (event) => fail(event.message || "this browser runs no modules in workers"));
  return post({ files: RUNTIME.files });
}

function post(message) {
  return new Promise((resolve, reject) => {
    const id = ++python.next;
    python.calls.set(id, ({ answer, failure }) => (failure ? reject(new Error(failure)) : resolve(answer)));
    python.worker.postMessage({ id, ...message });
  });
}

const asking = { timer: 0, runs: false, waits: false, starts: false, began: 0 };

function ask(patience) {
  clearTimeout(asking.timer);
  asking.timer = setTimeout(next, patience);
}

async function next() {
  asking.waits = asking.runs;
  if (asking.runs) return;
  asking.runs = true;
  asking.began = performance.now();
  element("result").setAttribute("aria-busy", "true");
  const asked = shown().map((index) => ({ index, schedule: setting(index).schedule }));
  try {
    history.replaceState(null, "", toHash()); // not at every step of a slider: browsers allow so many in a time
    const given = { settings: asked.map(({ index }) => words(index)), is_first: !element("picture").srcdoc };
    show(await post({ call: "answer", given }), asked);
    say(`Planned and simulated in ${((performance.now() - asking.began) / 1000).toFixed(2)} s.`);
  } catch (error) {
    fail(error.message);
  }
  asking.runs = false;
  element("result").setAttribute("aria-busy", String(asking.waits));
  if (asking.waits) next();
}

/** Say that it takes long; start again if what is running is no longer asked for. */
async function watch() {
  const passed = performance.now() - asking.began;
  if (!asking.runs || asking.starts || passed < 1000) return;
  say(`Planning for ${(passed / 1000).toFixed(0)} s${asking.waits ? "; your latest settings come next" : ""}.`);
  if (!asking.waits || passed < PATIENCE) return;
  asking.starts = true;
  python.worker.terminate();
  python.calls.clear();
  say("Starting Python again, for your latest settings.");
  try {
    await start();
    asking.starts = asking.runs = false;
    next();
  } catch (error) {
    fail(error.message);
  }
}

// ---- What comes back

function say(text) {
  element("status").textContent = text;
}

function fail(message) {
  say("");
  element("result").setAttribute("aria-busy", "false");
  element("errors").replaceChildren(made("p", `The page itself failed, which is a bug of bpipe's: ${message}`));
}

function made(tag, text, attributes = {}) {
  return Object.assign(document.createElement(tag), { textContent: text, ...attributes });
}

/** Show the answer to what was asked; the settings may have changed meanwhile. */
function show(answer, asked) {
  const titled = asked.map(({ index, schedule }, i) => ({ schedule, title: asked.length > 1 ? NAMES[index] : "", plan: answer.plans[i] }));
  const sentences = titled.map(({ title, plan: { error } }) => error && made("p", `${title ? `${title}: ` : ""}${error}`));
  element("errors").replaceChildren(...sentences.filter(Boolean));
  const good = titled.filter(({ plan }) => !plan.error);
  tabulate(answer.numbers, good);
  draw(answer);
  element("plans").replaceChildren(...good.map(described));
}

function tabulate(rows, plans) {
  const table = element("numbers");
  table.replaceChildren();
  if (!rows.length) return;
  const head = table.createTHead().insertRow(), body = table.createTBody();
  const areTwo = new Set(plans.map(({ schedule }) => schedule)).size === plans.length;
  for (const text of ["", ...plans.map(({ schedule, title }) => (areTwo ? schedule : title)), ...(plans.length > 1 ? ["difference"] : [])]) head.append(made("th", text, { scope: "col" }));
  for (const [name, ...texts] of rows) {
    const row = body.insertRow();
    row.append(made("th", name, { scope: "row" }), ...texts.map((text) => made("td", text)));
  }
}

/** Draw the scene in the page that `bpipe plot` writes: it is in a frame, and is given new data as long as it lives. */
function draw({ scene, page }) {
  const picture = element("picture");
  picture.hidden = !scene;
  if (!scene) return;
  const rows = scene.panels.flatMap((panel) => panel.rows), least = rows.some((row) => row.places) ? 74 : 52; // pixels
  picture.style.height = `${150 + 34 * scene.panels.length + Math.max(least, Math.min(90, 800 / rows.length)) * rows.length}px`;
  if (page) picture.srcdoc = page;
  else if (picture.contentWindow.show) picture.contentWindow.show(scene);
  else picture.addEventListener("load", () => picture.contentWindow.show(scene), { once: true });
}

function described({ plan, title, schedule }) {
  const article = document.createElement("article");
  article.append(made("h2", `${title ? `${title}: ` : ""}${schedule}`));
  for (const note of plan.notes) article.append(made("p", note, { className: "quiet" }));
  const parts = [["The plan: what each rank computes, in order", plan.grid, ""], ["The same in Python", plan.python, "wrap"], ["The same on the command line", plan.command, "wrap"]];
  for (const [part, text, className] of parts) {
    const heading = made("h3", part), button = made("button", "Copy", { type: "button" });
    button.setAttribute("aria-label", `Copy: ${part}`);
    button.addEventListener("click", () => copy(text, button));
    heading.append(button);
    article.append(heading, made("pre", text, { className, tabIndex: 0 }));
  }
  return article;
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "This browser lets no page copy: select the text";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

// ---- Setting up

async function main() {
  if (!globalThis.RUNTIME) {
    say("This page is not built yet: run `python -m docs.play` in bpipe's repository, and open build/play/index.html.");
    return element("result").setAttribute("aria-busy", "false");
  }
  await start();
  schedules = await post({ call: "schedules", given: {} });
  build();
  fromHash();
  element("compare").addEventListener("input", (event) => { state.compares = event.target.checked; update(); });
  element("form").addEventListener("submit", (event) => event.preventDefault());
  element("link").addEventListener("click", (event) => copy(location.href, event.target));
  element("reset").addEventListener("click", () => { Object.assign(state, { first: first(), second: { schedule: "balanced_1f1b" }, compares: true }); update(); });
  addEventListener("hashchange", () => { fromHash(); update(); });
  setInterval(watch, 500);
  update();
}

main().catch((error) => fail(error.message));
