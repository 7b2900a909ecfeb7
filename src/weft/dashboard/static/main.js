// The page: loads the history, hears what comes, and shows the run at the moment that the slider says.

import { Chart, colour } from "./chart.js";
import { drawGraph } from "./graph.js";
import { List } from "./list.js";
import { Rounds } from "./rounds.js";
import { AWAY, Store, contributed, linked, standing } from "./store.js";
import { amount, bytes, duration, percent } from "./words.js";

const by = (id) => document.getElementById(id);
const store = new Store();
const moment = { at: null, isPlaying: false }; // at: null is now
let sorting = { title: "share", isDown: true };
let isDue = false;

// --- what is shown ---

const loss = new Chart(by("loss"));
const traffic = new Chart(by("bytes"));
const rounds = new Rounds(by("rounds"), by("round-words"));
const peers = new List(by("peers"), {
  label: "Peers",
  columns: [{ title: "name" }, { title: "state" }, { title: "round" }, { title: "tokens/s" }, { title: "share" }],
  cells: ({ name, state, round, speed, share, isClaim }) => [
    [name, ""], [state, isClaim ? "claim" : ""], [round === null ? "" : String(round), ""], [speed ? amount(speed) : "", ""], [percent(share, 1), ""],
  ],
  onSort: (column) => {
    sorting = { title: column.title, isDown: sorting.title === column.title ? !sorting.isDown : column.title !== "name" };
    render();
  },
});
const events = new List(by("events"), {
  label: "Events, newest first",
  columns: [{ title: "when" }, { title: "who" }, { title: "what" }],
  cells: ([at, peer, severity, , text]) => [[clock(at), ""], [store.name(peer), ""], [text, `s${severity}`]],
});

function now() {
  return moment.at ?? store.last;
}

function clock(at) {
  return new Date(1000 * at).toLocaleTimeString([], { hour12: false });
}

function render() {
  isDue = false;
  const at = now();
  if (!Number.isFinite(at)) return;
  const states = standing(store, at);
  const tokens = contributed(store, at);
  showHead(at, states, tokens);
  showFigures(at, states);
  showLoss(at);
  showBytes(at);
  showPeers(states, tokens);
  const links = linked(store, at);
  drawGraph(by("graph"), store, states, links, at);
  by("graph-words").textContent = `${states.filter(Boolean).length} peers, ${links.length} links. ${wayOf(links)}`;
  rounds.draw(store, lanes(states), at);
  showEvents(at);
  showTexts(at);
  showTime(at);
}

function soon() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => requestAnimationFrame(render), 200);
}

function lastOf(list, at) {
  return list[store.until(list, at) - 1];
}

function showHead(at, states, tokens) {
  const { run } = store;
  const done = lastOf(store.rounds, at);
  const counted = done ? done[5] : 0;
  const share = run.total_tokens ? Math.min(1, counted / run.total_tokens) : null;
  const here = states.filter((state) => state && !AWAY.has(state[2])).length;
  by("name").textContent = run.name ?? "weft";
  document.title = run.name ? `${run.name} · weft` : "weft";
  const left = leftOf(at, counted);
  const parts = [done ? `round ${done[1]}` : "no round yet", `${here} of ${states.filter(Boolean).length} peers here`];
  if (share !== null) parts.push(`${amount(counted)} of ${amount(run.total_tokens)} tokens, ${percent(share)}`);
  else parts.push(`${amount(counted)} tokens`);
  if (left !== null) parts.push(`${duration(left)} left`);
  by("stands").textContent = parts.join(" · ");
  by("bar").style.width = percent(share ?? 0, 2);
  by("bar").setAttribute("aria-valuenow", String(Math.round(100 * (share ?? 0))));
  showMe(tokens);
}

// Seconds until all tokens are counted, at the pace of the last rounds.
function leftOf(at, counted) {
  const count = store.until(store.rounds, at);
  const total = store.run.total_tokens;
  if (!total || count < 2 || counted >= total) return null;
  const first = store.rounds[Math.max(0, count - 16)];
  const last = store.rounds[count - 1];
  const pace = (last[5] - first[5]) / (last[0] - first[0]);
  return pace > 0 ? (total - counted) / pace : null;
}

function showMe(tokens) {
  const box = by("me-box");
  const choice = by("me");
  box.hidden = !store.isPublic;
  if (!store.isPublic) return;
  while (choice.options.length <= store.peers.length) choice.add(new Option("", String(choice.options.length - 1)));
  for (let i = 0; i < store.peers.length; i += 1) {
    if (choice.options[i + 1].text !== store.name(i)) choice.options[i + 1].text = store.name(i);
  }
  if (choice.value !== "") {
    const all = tokens.reduce((a, b) => a + b, 0);
    by("stands").textContent += ` · you trained ${percent(all ? tokens[Number(choice.value)] / all : 0, 1)} of this`;
  }
}

function showFigures(at, states) {
  const train = lastOf(store.train, at);
  const heldout = lastOf(store.heldout, at);
  const moved = lastOf(store.bytes, at);
  const speed = states.reduce((sum, state) => sum + (state && !AWAY.has(state[2]) ? state[5] : 0), 0);
  const shares = [];
  for (let i = store.until(store.turns, at) - 1; i >= Math.max(0, store.until(store.turns, at) - 200); i -= 1) {
    const [, , , work, exchange] = store.turns[i];
    if (work + exchange > 0) shares.push(work / (work + exchange));
  }
  shares.sort((a, b) => a - b);
  const found = [
    ["training loss", train ? train[2].toFixed(3) : "–"],
    ["held-out loss", heldout ? heldout[2].toFixed(3) : "–"],
    ["nats per byte", heldout && heldout[3] !== null ? heldout[3].toFixed(3) : "–"],
    ["tokens a second", speed ? amount(speed) : "–"],
    ["time in inner steps", shares.length ? percent(shares[shares.length >> 1]) : "–"],
    ["bytes moved", moved ? bytes(moved[2]) : "–"],
    ["of ring DDP", moved && moved[2] && moved[3] ? `1/${amount(moved[3] / moved[2])}` : "–"],
  ];
  const list = by("figures");
  while (list.children.length < found.length) {
    const box = document.createElement("div");
    box.append(document.createElement("dt"), document.createElement("dd"));
    list.append(box);
  }
  found.forEach(([name, text], i) => {
    list.children[i].children[0].textContent = name;
    list.children[i].children[1].textContent = text;
  });
}

function showLoss(at) {
  const kind = by("loss-by").value;
  const moved = new Map(store.bytes.map((row) => [row[1], row[2]]));
  const x = { tokens: (row) => row[1], time: (row) => row[0] - store.first, bytes: (row) => moved.get(row[1]) }[kind];
  const points = (list) => list.slice(0, store.until(list, at)).map((row) => [x(row), row[2]]).filter(([a]) => a !== undefined);
  const curves = [
    { name: "training", colour: colour("--accent"), points: points(store.train) },
    { name: "held-out", colour: colour("--curve2"), points: points(store.heldout) },
  ];
  loss.draw({ curves, across: { tokens: amount, time: duration, bytes }[kind], up: (value) => value.toFixed(2) });
  by("loss-words").textContent = curves
    .filter((curve) => curve.points.length)
    .map(({ name, points: all }) => `${name} from ${all[0][1].toFixed(3)} to ${all[all.length - 1][1].toFixed(3)} nats per token`)
    .join("; ");
}

function showBytes(at) {
  const rows = store.bytes.slice(0, store.until(store.bytes, at));
  const curves = [{ name: "moved", colour: colour("--accent"), points: rows.map((row) => [row[1], row[2]]) }];
  if (rows.some((row) => row[3])) curves.push({ name: "ring DDP", colour: colour("--curve2"), points: rows.map((row) => [row[1], row[3]]) });
  traffic.draw({ curves, across: amount, up: bytes });
  const last = rows[rows.length - 1];
  by("bytes-words").textContent = last && last[2] && last[3]
    ? `${amount(last[3] / last[2])} times fewer bytes than data-parallel training in a ring: ${bytes(last[2])} of ${bytes(last[3])}, both ways, of the peers that are heard.`
    : "";
}

function showPeers(states, tokens) {
  const all = tokens.reduce((a, b) => a + b, 0) || 1;
  const rows = [];
  states.forEach((state, number) => {
    if (!state) return;
    const [, , what, round, , speed, whose] = state;
    rows.push({ name: store.name(number), state: what, round, speed: AWAY.has(what) ? 0 : speed, share: tokens[number] / all, isClaim: whose !== number });
  });
  const key = { name: (row) => row.name, state: (row) => row.state, round: (row) => row.round ?? -1, "tokens/s": (row) => row.speed, share: (row) => row.share }[sorting.title];
  rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (sorting.isDown ? -1 : 1));
  peers.sorted(peers.columns.find((column) => column.title === sorting.title), sorting.isDown);
  peers.show(rows);
}

function lanes(states) {
  return states.map((_, number) => number).filter((number) => states[number]);
}

function wayOf(links) {
  const counts = new Map();
  for (const [, , transport] of links) counts.set(transport, (counts.get(transport) ?? 0) + 1);
  return [...counts].map(([transport, count]) => `${count} over ${transport}`).join(", ");
}

let shown = { count: -1, severity: "", words: "" };

function showEvents(at) {
  const count = store.until(store.events, at);
  const severity = by("severity").value;
  const words = by("search").value.toLowerCase();
  if (shown.count === count && shown.severity === severity && shown.words === words) return;
  shown = { count, severity, words };
  const found = [];
  for (let i = count - 1; i >= 0; i -= 1) {
    const row = store.events[i];
    if (row[2] < Number(severity)) continue;
    if (words && !`${row[3]} ${row[4]} ${store.name(row[1])}`.toLowerCase().includes(words)) continue;
    found.push(row);
  }
  events.show(found);
}

function showTexts(at) {
  const advice = store.advice.slice(0, store.until(store.advice, at)).filter((row) => row[0] > at - 300).slice(-4);
  by("advice").hidden = !advice.length;
  replace(by("advice-list"), advice.reverse(), (row) => {
    const item = document.createElement("li");
    const what = document.createElement("b");
    what.textContent = row[2];
    item.append(what, row[3]);
    return item;
  });
  const samples = store.samples.slice(0, store.until(store.samples, at)).slice(-5).reverse();
  replace(by("samples"), samples, (row) => {
    const quote = document.createElement("blockquote");
    const prompt = document.createElement("b");
    prompt.textContent = row[2];
    quote.append(prompt, row[3]);
    quote.title = `after round ${row[1]}`;
    return quote;
  });
  by("method").textContent = store.run.method ?? "";
  replace(by("methods"), store.methods.slice(0, store.until(store.methods, at)), (row) => {
    const item = document.createElement("li");
    item.textContent = row[2];
    return item;
  });
}

// Show rows as elements, if they are others than before.
function replace(box, rows, make) {
  const key = JSON.stringify(rows.map((row) => [row[0], row[2]]));
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.replaceChildren(...rows.map(make));
}

// --- the moment ---

function showTime(at) {
  const whole = store.last - store.first || 1;
  by("slider").value = String(Math.round((1000 * (at - store.first)) / whole));
  by("slider").setAttribute("aria-valuetext", `${duration(at - store.first)} of ${duration(whole)}`);
  by("moment").textContent = moment.at === null && store.isLive ? "live" : `${duration(at - store.first)} of ${duration(whole)}`;
  by("play").textContent = moment.isPlaying ? "❚❚" : "▶";
  by("play").setAttribute("aria-label", moment.isPlaying ? "Pause" : "Play");
  by("live").hidden = moment.at === null || !store.isLive;
}

function go(at) {
  moment.at = at >= store.last ? null : Math.max(at, store.first);
  if (moment.at === null) moment.isPlaying = false;
  render();
}

let before = 0;

function play(time) {
  if (!moment.isPlaying) return;
  if (before) go(now() + ((time - before) / 1000) * Number(by("speed").value));
  before = time;
  requestAnimationFrame(play);
}

by("slider").addEventListener("input", (event) => {
  moment.isPlaying = false;
  go(store.first + ((store.last - store.first) * Number(event.target.value)) / 1000);
});
by("play").addEventListener("click", () => {
  moment.isPlaying = !moment.isPlaying;
  if (moment.isPlaying && moment.at === null) moment.at = store.first;
  before = 0;
  render();
  requestAnimationFrame(play);
});
by("live").addEventListener("click", () => go(Infinity));
by("closer").addEventListener("click", () => rounds.zoom(0.5));
by("farther").addEventListener("click", () => rounds.zoom(2));
for (const id of ["loss-by", "severity", "me"]) by(id).addEventListener("change", () => render());
by("search").addEventListener("input", () => render());
window.addEventListener("resize", soon);

// --- the theme ---

const systems = window.matchMedia("(prefers-color-scheme: dark)");

function wear() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (systems.matches ? "dark" : "light");
  render();
}

by("theme").addEventListener("click", () => {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  wear();
});
systems.addEventListener("change", wear);

// --- what comes ---

async function begin() {
  wear();
  const answer = await fetch("api/history");
  if (!answer.ok) {
    by("stands").textContent = await answer.text();
    return;
  }
  store.add(await answer.json());
  if (!store.states.length && store.isLive) by("stands").textContent = "nobody has told anything yet";
  render();
  if (!store.isLive) return;
  const stream = new EventSource(`api/stream?after=${store.cursor}`);
  stream.addEventListener("more", (event) => {
    store.add(JSON.parse(event.data));
    if (moment.at === null || store.last - store.first < 1) soon();
  });
  stream.addEventListener("end", () => {
    stream.close();
    store.isLive = false;
    soon();
  });
}

begin();
