// The lanes of the timeline, as they are drawn: a peer's turns, what it missed, when it led, when it went.
//
// Only lanes in sight are drawn. Where turns are narrower than a pixel or two, a column shows how its time was divided.

import { timeTicks } from "./chart.js";
import { count } from "./history.js";
import { colours } from "./theme.js";
import { bounded, since } from "./words.js";

export const HEAD = 26;
export const LANE = 28;
const BAR = 14;
const THIN = 2; // pixels: a turn narrower than this is drawn as a share of a column
const TICK_WIDTH = 90;

export class Lanes {
  constructor(history, moment, selection) {
    Object.assign(this, { history, moment, selection });
  }

  /** Draw what is in sight: {size, from, span_s, perSecond, usual_s, focus, scrolled}. */
  draw(context, sight) {
    Object.assign(this, sight);
    const paint = colours();
    const { width, height } = this.size;
    const first = Math.floor(this.scrolled / LANE);
    const last = Math.min(this.history.peers.length, first + Math.ceil((height - HEAD) / LANE) + 1);
    this._axis(context, paint);
    context.save();
    context.beginPath();
    context.rect(0, HEAD, width, height - HEAD);
    context.clip();
    for (let peer = first; peer < last; peer++) this._lane(context, paint, peer);
    context.restore();
  }

  _x(at) {
    return this.size.left + (at - this.from) * this.perSecond;
  }

  _axis(context, paint) {
    const { width, left, height } = this.size;
    const { start } = this.history;
    const from = Math.max(0, this.from - start);
    context.font = `11.5px ${paint.font}`;
    context.textAlign = "center";
    for (const at of timeTicks(from, this.from + this.span_s - start, (width - left) / TICK_WIDTH)) {
      const x = Math.round(this._x(start + at)) + 0.5;
      if (x < left) continue;
      context.fillStyle = paint.line;
      context.fillRect(x, HEAD - 4, 1, height);
      context.fillStyle = paint.quiet;
      if (x > left + 16 && x < width - 18) context.fillText(since(at), x, 10);
    }
    context.font = `12px ${paint.font}`;
  }

  _top(peer) {
    return HEAD + peer * LANE - this.scrolled;
  }

  _lane(context, paint, peer) {
    const { width, left } = this.size;
    const top = this._top(peer);
    if (peer === this.selection.peer) {
      context.fillStyle = paint.ground;
      context.fillRect(0, top, width, LANE);
    }
    context.save();
    context.beginPath();
    context.rect(left, Math.max(HEAD, top), width - left, LANE);
    context.clip();
    this._turns(context, paint, peer, top + (LANE - BAR) / 2);
    this._marks(context, paint, peer, top);
    context.restore();
    context.fillStyle = this.moment.isHere(peer) ? paint.text : paint.quiet;
    context.textAlign = "left";
    context.fillText(fitted(context, this.history.name(peer), left - 14), 6, top + LANE / 2);
  }

  /** Return the turns of a peer that are in sight, as places in its list. */
  _inSight(peer) {
    const turns = this.history.turnsOf[peer];
    const end = Math.min(count(turns, this.moment.at), count(turns, this.from + this.span_s) + 1);
    return [count(turns, this.from), end];
  }

  _turns(context, paint, peer, top) {
    const turns = this.history.turnsOf[peer];
    const [from, to] = this._inSight(peer);
    if (to <= from) return;
    const isDense = ((turns[to - 1][0] - turns[from][0]) * this.perSecond) / (to - from) < THIN;
    if (isDense) this._columns(context, paint, turns, from, to, top);
    else for (let i = from; i < to; i++) this._turn(context, paint, turns, i, top, peer);
  }

  _turn(context, paint, turns, i, top, peer) {
    const { work, exchange, begin, isNext } = parts(turns, i);
    const [at, , , , , , , isCounted] = turns[i];
    const bar = (from, to, colour, height = BAR) => {
      const x = this._x(from);
      context.fillStyle = colour;
      context.fillRect(
        x,
        top + (BAR - height) / 2,
        Math.max(0.75, this._x(to) - x - (this.perSecond > 1 ? 0.75 : 0)),
        height,
      );
    };
    if (isNext && work > begin) bar(begin, work, paint.idle, 3);
    bar(work, exchange, paint.work);
    bar(exchange, at, paint.exchange);
    if (!isCounted) this._missed(context, paint, at, top);
    if (this.focus && this.focus.peer === peer && this.focus.turn === i) {
      context.strokeStyle = paint.text;
      context.lineWidth = 2;
      context.strokeRect(
        this._x(isNext ? begin : work),
        top - 3,
        this._x(at) - this._x(isNext ? begin : work),
        BAR + 6,
      );
    }
  }

  /** Draw how the time of each column was divided. */
  _columns(context, paint, turns, from, to, top) {
    const columns = new Map();
    for (let i = from; i < to; i++) {
      const { work, exchange, begin, isNext } = parts(turns, i);
      const x = Math.floor(this._x(turns[i][0]) / THIN) * THIN;
      const sum = columns.get(x) ?? [0, 0, 0];
      sum[0] += exchange - work;
      sum[1] += turns[i][0] - exchange;
      sum[2] += isNext ? Math.max(0, work - begin) : 0;
      columns.set(x, sum);
    }
    for (const [x, [work_s, exchange_s, wait_s]] of columns) {
      const all = work_s + exchange_s + wait_s || 1;
      const height = (BAR * work_s) / all;
      const next = (BAR * exchange_s) / all;
      context.fillStyle = paint.work;
      context.fillRect(x, top + BAR - height, THIN, height);
      context.fillStyle = paint.exchange;
      context.fillRect(x, top + BAR - height - next, THIN, next);
      context.fillStyle = paint.idle;
      context.fillRect(x, top, THIN, BAR - height - next);
    }
  }

  _marks(context, paint, peer, top) {
    const { rounds } = this.history.rows;
    const end = Math.min(this.moment.at, this.from + this.span_s);
    for (let i = count(rounds, this.from); i < count(rounds, end); i++) {
      if (rounds[i][3] !== peer || this.usual_s * this.perSecond < 14) continue;
      const x = this._x(rounds[i][0]) - 5;
      context.fillStyle = paint.text;
      context.beginPath();
      context.moveTo(x - 4, top + 2);
      context.lineTo(x + 4, top + 2);
      context.lineTo(x, top + 8);
      context.fill();
    }
    const misses = this.history.missesOf[peer];
    for (let i = count(misses, this.from); i < count(misses, end); i++) {
      if (this._hasTurn(peer, misses[i])) continue; // which shows it itself
      this._missed(context, paint, misses[i][0], top + (LANE - BAR) / 2);
    }
    const state = this.moment.state(peer);
    if (state && !this.moment.isHere(peer)) this._away(context, paint, state, top);
  }

  /** Return whether a peer told of its turn in a round that it missed. */
  _hasTurn(peer, [at, number]) {
    const turns = this.history.turnsOf[peer];
    const near = count(turns, at);
    return turns.slice(Math.max(0, near - 2), near + 2).some((turn) => turn[2] === number);
  }

  _missed(context, paint, at, top) {
    const x = this._x(at) - 7;
    const y = top + BAR / 2;
    for (const [colour, width] of [
      [paint.surface, 5],
      [paint.bad, 2.25],
    ]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x - 4, y - 4);
      context.lineTo(x + 4, y + 4);
      context.moveTo(x + 4, y - 4);
      context.lineTo(x - 4, y + 4);
      context.stroke();
    }
  }

  _away(context, paint, [at, , state], top) {
    const x = Math.max(this.size.left, this._x(at) + 4);
    context.fillStyle = paint.quiet;
    context.textAlign = "left";
    if (x < this.size.width - 40) context.fillText(bounded(state, 24), x + 4, top + LANE / 2);
  }
}

/** Return when the parts of a turn began: waiting, work, exchange. */
export function parts(turns, i) {
  const [at, , number, work_s, exchange_s] = turns[i];
  const exchange = at - exchange_s;
  const before = turns[i - 1];
  const isNext = before !== undefined && before[2] === number - 1;
  return { work: exchange - work_s, exchange, begin: isNext ? before[0] : exchange - work_s, isNext };
}

function fitted(context, text, width) {
  let fits = bounded(text, 40);
  if (context.measureText(fits).width <= width) return fits;
  while (fits.length > 1 && context.measureText(`${fits}…`).width > width) fits = fits.slice(0, -1);
  return `${fits}…`;
}
