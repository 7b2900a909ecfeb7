// The rounds as a timeline: a lane for each peer, in it what it did when; who led, and who was left out.
//
// The wheel scrolls lanes, and zooms with Ctrl held, as maps do; buttons, a drag and keys do the same.

import { clear, find, tell } from "./dom.js";
import { STAGE_OF_ROUND, STAGE_OF_TURN, count } from "./history.js";
import { HEAD, LANE, Lanes, parts } from "./lanes.js";
import { median } from "./moment.js";
import { colours } from "./theme.js";
import { bounded, duration, plural, since } from "./words.js";

const ROUND_WIDTH = 88; // pixels of a usual round at first
const ZOOM = 1.5;
const LEAST_S = 1;

export class Rounds {
  constructor(history, moment, selection) {
    Object.assign(this, { history, moment, selection });
    this.box = find("lanes");
    this.canvas = find("rounds");
    this.lanes = new Lanes(history, moment, selection);
    this.span_s = null; // follows from the rounds until somebody zooms
    this.until = null; // right edge, or null: the time that is shown
    this.focus = null; // {peer, turn}
    this._listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  _listen() {
    const { box, canvas } = this;
    box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    box.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this._grab(event));
    canvas.addEventListener("pointermove", (event) => this._move(event));
    canvas.addEventListener("pointerup", () => (this.held = null));
    canvas.addEventListener("pointercancel", () => (this.held = null));
    canvas.addEventListener("pointerleave", () => this._look(null));
    canvas.addEventListener("keydown", (event) => this._key(event));
    find("rounds-in").addEventListener("click", () => this._zoom(1 / ZOOM));
    find("rounds-out").addEventListener("click", () => this._zoom(ZOOM));
    find("rounds-all").addEventListener("click", () => this._all());
    find("rounds-now").addEventListener("click", () => this._now());
    this.selection.onChange(() => this.draw());
  }

  draw() {
    const num = this.history.peers.length;
    const { clientWidth: width, clientHeight: height } = this.box;
    find("lanes-inner").style.height = `${HEAD + num * LANE + 6}px`;
    if (!width || !num || !this.history.hasRows) return;
    this.size = { width, height, left: width < 520 ? 82 : 132 };
    this._frame();
    const { size, from, span_s, perSecond, usual_s, focus } = this;
    this.lanes.draw(this._begin(), { size, from, span_s, perSecond, usual_s, focus, scrolled: this.box.scrollTop });
    tell(find("rounds-words"), this._words());
  }

  // --- time ---

  /** Settle which time is in sight. */
  _frame() {
    this.usual_s = this._usual();
    this.span_s ??= (this.usual_s * (this.size.width - this.size.left)) / ROUND_WIDTH;
    const until = this.until ?? this.moment.time + this.span_s * 0.01;
    this.from = until - this.span_s;
    this.perSecond = (this.size.width - this.size.left - 8) / this.span_s;
  }

  /** Return how long a round usually takes. */
  _usual() {
    const { rounds } = this.history.rows;
    const some = rounds.slice(-30);
    const lengths = some.slice(1).map((row, i) => row[0] - some[i][0]);
    return lengths.length ? Math.max(median(lengths), 0.1) : 10;
  }

  _zoom(times, x = this.size.width - 8) {
    const whole = Math.max(LEAST_S, (this.history.end - this.history.start) * 1.05);
    const at = this.from + (x - this.size.left) / this.perSecond;
    const before = this.span_s;
    this.span_s = Math.min(whole, Math.max(LEAST_S, this.span_s * times));
    if (this.until !== null) this.until = at + (this.from + before - at) * (this.span_s / before);
    this.draw();
  }

  _pan(pixels) {
    const until = (this.until ?? this.from + this.span_s) + pixels / this.perSecond;
    this.until = Math.max(this.history.start + this.span_s * 0.2, until);
    if (this.until >= this.moment.time) this.until = null; // it follows again
    this.draw();
  }

  _all() {
    this.span_s = Math.max(LEAST_S, (this.history.end - this.history.start) * 1.03);
    this.until = this.history.end + this.span_s * 0.01;
    this.draw();
  }

  _now() {
    this.span_s = this.until = null;
    this.draw();
  }

  // --- strokes ---

  _begin() {
    const { width, height } = this.size;
    this.canvas.style.inlineSize = `${width}px`;
    this.canvas.style.blockSize = `${height}px`;
    const context = clear(this.canvas, width, height);
    context.font = `12px ${colours().font}`;
    context.textBaseline = "middle";
    return context;
  }

  // --- reader ---

  _wheel(event) {
    const isZoom = event.ctrlKey || event.metaKey;
    if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && !event.shiftKey) return;
    event.preventDefault();
    if (isZoom) this._zoom(1.0015 ** event.deltaY, event.offsetX);
    else this._pan(event.deltaX || event.deltaY);
  }

  _grab(event) {
    this.held = { x: event.offsetX }; // a finger that goes up or down scrolls the page, and this is cancelled
    this.canvas.setPointerCapture(event.pointerId);
    this._pick(event);
  }

  _pick(event) {
    const found = this._find(event.offsetX, event.offsetY);
    if (found) this.selection.pick(found.peer);
  }

  _move(event) {
    if (this.held) {
      this._pan(this.held.x - event.offsetX);
      this.held.x = event.offsetX;
      return;
    }
    this._look(this._find(event.offsetX, event.offsetY));
  }

  /** Return whose turn is at a place. */
  _find(x, y) {
    if (!this.size || y < HEAD) return null;
    const peer = Math.floor((y - HEAD + this.box.scrollTop) / LANE);
    if (!this.history.turnsOf[peer]) return null;
    if (x < this.size.left) return { peer, turn: -1 };
    const turns = this.history.turnsOf[peer];
    const at = this.from + (x - this.size.left) / this.perSecond;
    const turn = count(turns, at);
    const isThere = turn < count(turns, this.moment.at) && parts(turns, turn).begin <= at;
    return { peer, turn: isThere ? turn : -1, at };
  }

  /** Return the round that a peer missed without telling of a turn, where the reader points at it. */
  _missAt({ peer, at }) {
    const misses = this.history.missesOf[peer] ?? [];
    const near = (miss) => miss[0] <= this.moment.at && Math.abs(miss[0] - at) < this.usual_s / 2;
    return misses.find(near);
  }

  _look(focus) {
    if (focus?.peer === this.focus?.peer && focus?.turn === this.focus?.turn && focus?.turn !== -1) return;
    this.focus = focus;
    this.draw();
  }

  _key(event) {
    const zoom = { "+": 1 / ZOOM, "=": 1 / ZOOM, "-": ZOOM }[event.key];
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.ctrlKey || event.metaKey || (!zoom && !step && event.key !== "Enter")) return;
    event.preventDefault();
    if (zoom) this._zoom(zoom);
    else if (step) this._step(...step);
    else if (this.focus) this.selection.pick(this.focus.peer);
  }

  /** Go to the next lane, or the next turn of a lane, and bring it into sight. */
  _step(lanes, turns) {
    const at = this.focus
      ? (this.history.turnsOf[this.focus.peer][this.focus.turn]?.[0] ?? this.moment.time)
      : this.moment.time;
    const first = Math.floor(this.box.scrollTop / LANE);
    const peer = Math.min(this.history.peers.length - 1, Math.max(0, this.focus ? this.focus.peer + lanes : first));
    const own = this.history.turnsOf[peer];
    const num = count(own, this.moment.at);
    const turn = Math.min(num - 1, Math.max(0, count(own, at) - 1 + turns));
    const top = peer * LANE;
    const room = this.box.clientHeight - HEAD - LANE;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top > this.box.scrollTop + room) this.box.scrollTop = top - room;
    if (own[turn] && (own[turn][0] < this.from + this.span_s * 0.1 || own[turn][0] > this.from + this.span_s)) {
      this.until = own[turn][0] + this.span_s / 2;
    }
    this.focus = { peer, turn };
    this.draw();
  }

  _words() {
    const { focus, history } = this;
    const turn = focus && history.turnsOf[focus.peer]?.[focus.turn];
    if (turn) return this._turnWords(focus, turn);
    const miss = focus && this._missAt(focus);
    if (miss) return `${history.name(focus.peer)} missed round ${miss[1]}: ${bounded(miss[2], 200)}.`;
    const round = this.moment.last("rounds");
    if (!round) return "No round is complete yet.";
    return this._roundWords(round);
  }

  _turnWords({ peer, turn }, row) {
    const [at, , number, work_s, exchange_s] = row;
    const { work, begin, isNext } = parts(this.history.turnsOf[peer], turn);
    const wait_s = isNext ? Math.max(0, work - begin) : 0;
    const spent = `${duration(work_s)} training, ${duration(exchange_s)} exchanging, ${duration(wait_s)} waiting`;
    const miss = this.history.missesOf[peer].find((each) => each[1] === number);
    const why = miss ? ` Left out: ${bounded(miss[2], 200)}.` : row[7] ? "" : " It did not count.";
    const round = this.history.roundOf.get(number);
    const stage = row[STAGE_OF_TURN];
    const leads = round?.[3] === peer && round[STAGE_OF_ROUND] === stage ? " It led the round." : "";
    const where = stage === undefined ? "" : ` in stage ${stage + 1}`;
    const which = `${this.history.name(peer)}${where}, round ${number}, ended at ${since(at - this.history.start)}`;
    return `${which}: ${spent}.${leads}${why}`;
  }

  _roundWords([, number, attempt, leader, , , contributors, out]) {
    const led = leader === null ? "" : `, led by ${this.history.name(leader)}`;
    const tries = attempt > 1 ? ` at try ${attempt + 1}` : "";
    const [first] = out;
    const more = out.length > 1 ? ` and ${out.length - 1} more` : "";
    const without = first
      ? ` Left out: ${this.history.name(first[0])}${more} (${bounded(first[1], 120)}).`
      : " Nobody was left out.";
    return `Round ${number}${led}${tries}: ${plural(contributors.length, "peer")} counted.${without}`;
  }
}
