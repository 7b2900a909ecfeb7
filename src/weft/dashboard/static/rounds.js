// Rounds as lanes: of each peer its inner steps, its exchange, and what lies between.

import { colour, surface } from "./chart.js";
import { duration } from "./words.js";

const LANE = 20;
const LEFT = 96;

export class Rounds {
  constructor(box, words) {
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.space = box.querySelector("div");
    this.words = words;
    this.seconds = 300;
    this.isChosen = false;
    box.addEventListener("scroll", () => this.again(), { passive: true });
    box.addEventListener("pointermove", (event) => this.tell(event));
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    new ResizeObserver(() => this.again()).observe(box);
  }

  zoom(times) {
    this.isChosen = true;
    this.seconds = Math.min(Math.max(this.seconds * times, 5), 1e7);
    this.again();
  }

  again() {
    if (this.store) this.draw(this.store, this.lanes, this.at);
  }

  draw(store, lanes, at) {
    Object.assign(this, { store, lanes, at });
    if (!this.isChosen) this.seconds = Math.min(Math.max(at - store.first, 30), 600);
    const lane = new Map(lanes.map((peer, i) => [peer, i]));
    this.box.style.height = `${Math.min(lanes.length * LANE + 26, 320)}px`;
    this.space.style.height = `${Math.max(0, lanes.length * LANE + 24 - this.box.clientHeight)}px`;
    const { pen, width, height } = surface(this.canvas);
    const top = this.box.scrollTop;
    const from = at - this.seconds;
    const x = (time) => LEFT + ((width - LEFT) * (time - from)) / this.seconds;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const first = Math.floor(top / LANE);
    const last = Math.min(lanes.length, first + Math.ceil(height / LANE) + 1);
    for (let i = first; i < last; i += 1) {
      const y = i * LANE - top;
      pen.fillStyle = colour("--idle");
      pen.fillRect(LEFT, y + 3, width - LEFT, LANE - 6);
    }
    this.bars(pen, x, lane, first, last, top, from);
    pen.fillStyle = colour("--card");
    pen.fillRect(0, 0, LEFT - 4, height);
    pen.fillStyle = colour("--text");
    for (let i = first; i < last; i += 1) pen.fillText(store.name(lanes[i]).slice(0, 13), 0, i * LANE - top + LANE / 2);
    pen.fillStyle = colour("--card");
    pen.fillRect(0, height - 22, width, 22);
    pen.fillStyle = colour("--dim");
    for (const share of [0, 0.25, 0.5, 0.75]) pen.fillText(`−${duration(this.seconds * (1 - share))}`, x(from + share * this.seconds) + 2, height - 10);
  }

  bars(pen, x, lane, first, last, top, from) {
    const [work, exchange, missed] = ["--work", "--exchange", "--missed"].map(colour);
    const { turns } = this.store;
    for (let i = this.store.until(turns, this.at) - 1; i >= 0; i -= 1) {
      const [end, peer, , workS, exchangeS, , , isCounted] = turns[i];
      if (end < from - 60) break;
      const number = lane.get(peer);
      if (number === undefined || number < first || number >= last) continue;
      const y = number * LANE - top + 3;
      const bar = (start, stop, shade) => {
        pen.fillStyle = shade;
        pen.fillRect(x(start), y, Math.max(x(stop) - x(start), 0.7), LANE - 6);
      };
      bar(end - exchangeS - workS, end - exchangeS, isCounted ? work : missed);
      bar(end - exchangeS, end, exchange);
    }
  }

  tell(event) {
    if (!this.store) return;
    const bounds = this.box.getBoundingClientRect();
    const peer = this.lanes[Math.floor((event.clientY - bounds.top + this.box.scrollTop) / LANE)];
    const time = this.at - this.seconds + ((event.clientX - bounds.left - LEFT) / (bounds.width - LEFT)) * this.seconds;
    const turn = this.store.turns.find(([end, who, , work, exchange]) => who === peer && end >= time && end - work - exchange <= time);
    if (turn) this.words.textContent = described(this.store, turn);
  }
}

// A peer's account of a round, in words.
function described(store, [, peer, round, work, exchange, , , isCounted]) {
  const found = store.rounds.find((row) => row[1] === round);
  const led = found && found[3] !== null ? `, led by ${store.name(found[3])}` : "";
  const out = found && found[7].length ? `; left out: ${found[7].map(([who, why]) => `${store.name(who)} (${why})`).join(", ")}` : "";
  const counted = isCounted ? "" : ", not counted";
  return `${store.name(peer)}, round ${round}: ${work.toFixed(1)} s of inner steps, ${exchange.toFixed(1)} s of exchange${counted}${led}${out}.`;
}
