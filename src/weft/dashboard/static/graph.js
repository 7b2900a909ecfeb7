// The peers as a living graph: a node each, coloured by state and as large as what it brought; a line for each link
// that is up, brighter while its ends exchange.
//
// Places follow from the number of peers alone: a ring for few, a spiral that fills a disc evenly for many. Lines at
// rest are drawn once and kept; a frame draws those in use and the nodes: its cost grows with peers and links alone.
// The history says when a peer exchanged, not with whom: a line counts as in use where both its ends exchange.

import { clear, find, tell, wantsStillness } from "./dom.js";
import { count } from "./history.js";
import { kindOf } from "./selection.js";
import { colours } from "./theme.js";
import { bounded, percent, plural, short, whole } from "./words.js";

const MOST_ON_RING = 16;
const MOST_NAMED = 28;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const LEVELS = 4; // of brightness: one stroke each
const FADE_S = 0.8; // of the reader's time
const FRAME_MS = 30; // calm enough, and easy on a laptop that trains
const LATE_S = 8; // where nothing comes for so long, the graph comes to rest

export class Graph {
  constructor(history, moment, selection, wake) {
    Object.assign(this, { history, moment, selection });
    this.canvas = find("graph");
    this.still = document.createElement("canvas");
    this.under = null;
    this.pace = 1; // seconds of the run in a second of the reader's
    this.came = 0;
    this.canvas.addEventListener("pointermove", (event) => this._hover(this._at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("pointerleave", () => this._hover(null));
    this.canvas.addEventListener("click", () => this.under !== null && selection.pick(this.under));
    this.canvas.addEventListener("keydown", (event) => this._key(event));
    selection.onChange(() => this.draw());
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      wake();
    }).observe(this.canvas);
  }

  /** Take up what has changed: places, states, links. */
  refresh() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    this.size = { width, height };
    this.nodes = this._laid(this.history.peers.length);
    const shares = this.moment.shares;
    const most = Math.max(...this.nodes.map((_, peer) => shares[peer] ?? 0), 1);
    const large = this.nodes.length > MOST_ON_RING ? 5 : 13;
    const small = this.nodes.length > 300 ? 1.8 : this.nodes.length > MOST_ON_RING ? 3 : 6;
    this.nodes.forEach((node, peer) => {
      const row = this.moment.state(peer);
      node.state = row?.[2];
      node.kind = row ? kindOf(row[2]) : "idle";
      node.radius =
        small +
        (large - small) * Math.sqrt(Math.max(0, shares[peer] ?? 0) / most) * (this.nodes.length > 300 ? 0.55 : 1);
    });
    this.edges = [...this.moment.links.values()].filter(([, one, other]) => this.nodes[one] && this.nodes[other]);
    this._drawStill();
    this.draw();
    tell(find("graph-words"), this._words());
  }

  /** Return whether there is something to see that moves. */
  isLively(now) {
    return this.isSeen && !wantsStillness() && now - this.came < LATE_S * 1000;
  }

  frame(now) {
    if (this.isLively(now) && now - this.drawn >= FRAME_MS) this.draw(now);
  }

  draw(now = performance.now()) {
    if (!this.nodes) return;
    this.drawn = now;
    const { width, height } = this.size;
    const context = clear(this.canvas, width, height);
    context.drawImage(this.still, 0, 0, width, height);
    this._drawUsed(context, now);
    this._drawNodes(context);
  }

  // --- places ---

  _laid(num) {
    const { width, height } = this.size;
    const isRing = num <= MOST_ON_RING;
    const [rx, ry] = isRing
      ? [Math.min(width / 2 - 70, height * 0.62), height / 2 - 48]
      : [Math.min(width, height) / 2 - 14, Math.min(width, height) / 2 - 14];
    return Array.from({ length: num }, (_, i) => {
      const turn = isRing ? (2 * Math.PI * i) / num - (num === 2 ? Math.PI : Math.PI / 2) : i * GOLDEN;
      const far = isRing ? (num === 1 ? 0 : 1) : Math.sqrt((i + 0.5) / num);
      return { x: width / 2 + rx * far * Math.cos(turn), y: height / 2 + ry * far * Math.sin(turn) };
    });
  }

  _at(x, y) {
    let best = null;
    let least = 18 ** 2;
    (this.nodes ?? []).forEach((node, peer) => {
      const far = (node.x - x) ** 2 + (node.y - y) ** 2;
      if (far < least) [least, best] = [far, peer];
    });
    return best;
  }

  // --- strokes ---

  _drawStill() {
    const context = clear(this.still, this.size.width, this.size.height);
    context.strokeStyle = colours().idle;
    context.lineWidth = this.edges.length > 500 ? 0.5 : 1;
    context.globalAlpha = this.edges.length > 500 ? 0.45 : 0.7;
    this._path(context, this.edges);
  }

  /** Draw the lines in use, and on few of them a dot that goes the way of the link. */
  _drawUsed(context, now) {
    const uses = this.nodes.map((_, peer) => this._use(peer, now));
    const levels = Array.from({ length: LEVELS + 1 }, () => []);
    for (const edge of this.edges) levels[Math.round(Math.min(uses[edge[1]], uses[edge[2]]) * LEVELS)].push(edge);
    const isDense = this.edges.length > 500;
    context.strokeStyle = context.fillStyle = colours().exchange;
    for (let level = 1; level <= LEVELS; level++) {
      context.globalAlpha = (level / LEVELS) * (isDense ? 0.12 : 0.9);
      context.lineWidth = isDense ? 0.75 : 1 + (1.5 * level) / LEVELS;
      this._path(context, levels[level]);
      if (!isDense && !wantsStillness()) for (const edge of levels[level]) this._dot(context, edge, now);
    }
    context.globalAlpha = 1;
  }

  _dot(context, [, from, to], now) {
    const [a, b] = [this.nodes[from], this.nodes[to]];
    const way = (now / 1400 + ((from * 7 + to) % 5) / 5) % 1;
    context.beginPath();
    context.arc(a.x + (b.x - a.x) * way, a.y + (b.y - a.y) * way, 2.5, 0, 7);
    context.fill();
  }

  _path(context, edges) {
    context.beginPath();
    for (const [, from, to] of edges) {
      context.moveTo(this.nodes[from].x, this.nodes[from].y);
      context.lineTo(this.nodes[to].x, this.nodes[to].y);
    }
    context.stroke();
  }

  /** Return how much a peer exchanges, from 0 to 1: 1 while it does, fading afterwards. */
  _use(peer, now) {
    const time = this.moment.time + (this.moment.at === Infinity ? (now - this.came) / 1000 : 0);
    const turns = this.history.turnsOf[peer];
    const num = count(turns, time);
    if (turns[num] && time >= turns[num][0] - turns[num][4]) return 1;
    return num ? Math.exp((turns[num - 1][0] - time) / (FADE_S * Math.max(1, this.pace))) : 0;
  }

  _drawNodes(context) {
    const paint = colours();
    for (const kind of ["good", "wait", "warn", "done", "idle"]) {
      context.beginPath();
      for (const node of this.nodes) {
        if (node.kind !== kind) continue;
        context.moveTo(node.x + node.radius, node.y);
        context.arc(node.x, node.y, node.radius, 0, 7);
      }
      context.fillStyle = kind === "idle" ? paint.surface : paint[kind];
      context.fill();
      if (kind !== "idle" && this.nodes.length > 300) continue; // so close together a rim would hide the node
      context.lineWidth = 1.5;
      context.strokeStyle = kind === "idle" ? paint.faint : paint.surface;
      context.stroke();
    }
    for (const peer of new Set([this.selection.peer, this.under])) this._ring(context, peer);
    this._names(context);
  }

  _ring(context, peer) {
    const node = this.nodes[peer];
    if (!node) return;
    context.strokeStyle = colours().text;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(node.x, node.y, node.radius + 3.5, 0, 7);
    context.stroke();
  }

  _names(context) {
    const paint = colours();
    const all = this.nodes.length <= MOST_NAMED ? this.nodes.keys() : new Set([this.selection.peer, this.under]);
    context.font = `500 12px ${paint.font}`;
    context.textBaseline = "middle";
    for (const peer of all) {
      const node = this.nodes[peer];
      if (!node) continue;
      const isAbove = node.y < this.size.height / 2;
      const name = this.history.name(peer).slice(0, 24);
      const half = context.measureText(name).width / 2;
      const x = Math.min(this.size.width - half - 4, Math.max(half + 4, node.x));
      const y = node.y + (isAbove ? -1 : 1) * (node.radius + 14);
      context.textAlign = "center";
      context.lineWidth = 4;
      context.strokeStyle = paint.surface;
      context.strokeText(name, x, y);
      context.fillStyle = ["idle", "done"].includes(node.kind) ? paint.quiet : paint.text;
      context.fillText(name, x, y);
    }
  }

  // --- reader ---

  _hover(peer) {
    if (peer === this.under) return;
    this.under = peer;
    this.canvas.classList.toggle("on-peer", peer !== null);
    tell(find("graph-words"), peer === null ? this._words() : this.about(peer));
    this.draw();
  }

  _key(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const num = this.nodes?.length;
    if (!num || (step === undefined && event.key !== "Enter")) return;
    event.preventDefault();
    if (event.key === "Enter") this.selection.pick(this.under);
    else this._hover(((this.under ?? (step > 0 ? -1 : 0)) + step + num) % num);
  }

  about(peer) {
    const row = this.moment.state(peer);
    const speed = row?.[5] ? `, ${short(row[5])} tokens a second` : "";
    const share = `${percent(this.moment.share(peer))} of all tokens`;
    return `${this.history.name(peer)}: ${bounded(row?.[2] || "not here", 60)}${speed}, ${share}.`;
  }

  _words() {
    const here = this.nodes.filter((_, peer) => this.moment.isHere(peer)).length;
    const over = new Map();
    for (const [, , , transport] of this.edges) over.set(transport, (over.get(transport) ?? 0) + 1);
    const ways = [...over].slice(0, 4).map(([transport, num]) => `${whole(num)} over ${bounded(transport, 16)}`);
    const links = `${plural(this.edges.length, "link")} up${ways.length ? `: ${ways.join(", ")}` : ""}`;
    return `${plural(here, "peer")} of ${whole(this.nodes.length)} here, ${links}.`;
  }
}
