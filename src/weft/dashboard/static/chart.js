// Lines over an axis, on a canvas, with a legend that tells the values under the pointer.
//
//   chart.draw({series, x, y, x_now})
//     series   [{name, colour, points: [[x, y], ...], isDotted}]; points are in order of x
//     x, y     {format, isLog, isTime, min, max}; what is left out follows from the points
//     x_now    points after it are the future of a replay, and faint
//
// Arrow keys move the pointer's line as the mouse does. A sentence that tells the same is the caller's.

import { clear, make, tell } from "./dom.js";
import { colours } from "./theme.js";

const ROOM = { left: 52, right: 14, top: 10, bottom: 26 };
const BEYOND = 1e100; // what nobody measured: it must not stretch an axis
const X_TICK_WIDTH = 80;
const Y_TICK_HEIGHT = { low: 34, tall: 54 };

export class Chart {
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    this.what = null;
    this.under = null; // x of the pointer's line, or null
    this.labels = [];
    canvas.addEventListener("pointermove", (event) => this._point(this._x(event.offsetX)));
    canvas.addEventListener("pointerleave", () => this._point(null));
    canvas.addEventListener("blur", () => this._point(null));
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  draw(what) {
    this.what = what;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    this.box = {
      x: ROOM.left,
      y: ROOM.top,
      width: width - ROOM.left - ROOM.right,
      height: height - ROOM.top - ROOM.bottom,
    };
    this.context = clear(this.canvas, width, height);
    this.xs = range(what.series, 0, what.x);
    this.ys = range(what.series, 1, what.y);
    this._axes();
    for (const series of what.series) this._line(series);
    this._mark();
    this._tell();
  }

  // --- places ---

  _left(x) {
    return this.box.x + ((x - this.xs.min) / (this.xs.max - this.xs.min)) * this.box.width;
  }

  _top(y) {
    return this.box.y + this.box.height * (1 - (scaled(y, this.ys) - this.ys.low) / (this.ys.high - this.ys.low));
  }

  _x(left) {
    return this.xs ? this.xs.min + ((left - this.box.x) / this.box.width) * (this.xs.max - this.xs.min) : 0;
  }

  // --- strokes ---

  _axes() {
    const { context, box, what } = this;
    const paint = colours();
    context.font = `11.5px ${paint.font}`;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const y of ticks(this.ys, box.height / (box.height > 180 ? Y_TICK_HEIGHT.tall : Y_TICK_HEIGHT.low))) {
      const top = Math.round(this._top(y)) + 0.5;
      context.strokeStyle = paint.line;
      stroke(context, box.x, top, box.x + box.width, top);
      context.fillStyle = paint.quiet;
      context.fillText(what.y.format(y), box.x - 8, top);
    }
    context.textBaseline = "top";
    const wanted = box.width / X_TICK_WIDTH;
    for (const x of what.x.isTime ? timeTicks(this.xs.min, this.xs.max, wanted) : ticks(this.xs, wanted)) {
      const left = this._left(x);
      context.textAlign = left > box.x + box.width - 24 ? "right" : left < box.x + 12 ? "left" : "center";
      context.fillText(what.x.format(x), left, box.y + box.height + 9);
    }
  }

  _line({ points, colour, isDotted }) {
    const { context, what } = this;
    const now = what.x_now ?? Infinity;
    const past = points.filter(([x]) => x <= now);
    const future = points.slice(Math.max(0, past.length - 1));
    context.lineJoin = "round";
    context.strokeStyle = context.fillStyle = colours()[colour];
    context.lineWidth = 1.25;
    context.globalAlpha = 0.22;
    if (future.length > 1) this._path(future);
    context.globalAlpha = 1;
    context.lineWidth = 1.75;
    this._path(past);
    if (isDotted && past.length < this.box.width / 8)
      for (const [x, y] of past) dot(context, this._left(x), this._top(y), 2.25);
    const end = past[past.length - 1];
    if (end) dot(context, this._left(end[0]), this._top(end[1]), 3.25);
  }

  _path(points) {
    const { context } = this;
    context.beginPath();
    for (const [left, top] of this._thinned(points)) context.lineTo(left, top);
    context.stroke();
  }

  /** Yield places; where several points share a column of pixels, the lowest and the highest of them. */
  *_thinned(points) {
    const isDense = points.length > 2 * this.box.width;
    let column = null;
    let low = 0;
    let high = 0;
    for (const [x, y] of points) {
      const left = this._left(x);
      const top = this._top(y);
      if (!isDense) {
        yield [left, top];
        continue;
      }
      if (Math.floor(left) === column) {
        low = Math.min(low, top);
        high = Math.max(high, top);
        continue;
      }
      if (column !== null)
        yield* [
          [column, low],
          [column, high],
        ];
      column = Math.floor(left);
      low = high = top;
    }
    if (column !== null)
      yield* [
        [column, low],
        [column, high],
      ];
  }

  _mark() {
    if (this.under === null) return;
    const { context, box } = this;
    const left = Math.round(this._left(this.under)) + 0.5;
    context.strokeStyle = colours().faint;
    stroke(context, left, box.y, left, box.y + box.height);
    for (const { points, colour } of this.what.series) {
      const near = nearest(points, this.under);
      if (!near) continue;
      context.fillStyle = colours()[colour];
      dot(context, this._left(near[0]), this._top(near[1]), 3.5);
    }
  }

  // --- pointer and legend ---

  _point(x) {
    this.under = x === null || !this.xs ? null : Math.min(this.xs.max, Math.max(this.xs.min, x));
    if (this.what) this.draw(this.what);
  }

  _key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.xs) return;
    event.preventDefault();
    const from = this.under ?? this.what.x_now ?? this.xs.max;
    const far = (this.xs.max - this.xs.min) / 50;
    this._point(Math.abs(step) === Infinity ? (step < 0 ? this.xs.min : this.xs.max) : from + step * far);
  }

  _tell() {
    const { series, x, y, x_now } = this.what;
    const at = this.under ?? Math.min(x_now ?? Infinity, this.xs.max);
    while (this.labels.length < series.length) this._label();
    this.labels.forEach((label, i) => {
      label.item.hidden = i >= series.length;
      if (label.item.hidden) return;
      label.key.dataset.colour = series[i].colour;
      tell(label.name, series[i].name);
      const near = nearest(series[i].points, at);
      tell(label.value, near ? (y.formatValue ?? y.format)(near[1]) : "–");
    });
    this.where ??= this.legend.appendChild(make("span", { class: "where" }));
    tell(this.where, this.under === null ? "" : `at ${x.format(this.under)}`);
  }

  _label() {
    const label = { key: make("span", { class: "key" }), name: make("span"), value: make("b") };
    label.item = make("span", { class: "label" }, label.key, label.name, label.value);
    this.labels.push(label);
    this.legend.insertBefore(label.item, this.where ?? null);
  }
}

function dot(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}

function stroke(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function scaled(value, { isLog }) {
  return isLog ? Math.log10(Math.max(value, Number.MIN_VALUE)) : value;
}

/** Return the span of an axis, with `low` and `high` of it as they are drawn. */
function range(series, side, { min, max, isLog = false }) {
  let low = Infinity;
  let high = -Infinity;
  for (const { points } of series) {
    for (const point of points) {
      const value = point[side];
      if (!(Math.abs(value) < BEYOND) || (isLog && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) [low, high] = isLog ? [1, 10] : [0, 1];
  const room = side === 1 && !isLog ? (high - low) * 0.06 : 0;
  min ??= low - room;
  max ??= high + room;
  if (max <= min) max = isLog ? min * 10 : min + (Math.abs(min) || 1);
  return { min, max, isLog, low: scaled(min, { isLog }), high: scaled(max, { isLog }) };
}

/** Return round numbers of a span, about as many as wanted; powers of ten where it is logarithmic. */
function ticks({ min, max, isLog, low, high }, wanted) {
  if (isLog) {
    const step = Math.max(1, Math.ceil((high - low) / wanted));
    const powers = [];
    for (let power = Math.ceil(low); power <= high; power += step) powers.push(10 ** power);
    return powers;
  }
  const rough = (max - min) / Math.max(1, wanted);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5, 10].find((times) => times * unit >= rough) ?? 10);
  const numbers = [];
  for (let i = Math.ceil(min / step); i * step <= max + step / 1e6 && numbers.length < 50; i++) numbers.push(i * step);
  return numbers;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

/** Return times of a span at which a clock shows something round. */
export function timeTicks(min, max, wanted) {
  const rough = (max - min) / Math.max(1, wanted);
  const step = TIME_STEPS.find((each) => each >= rough) ?? Math.ceil(rough / 86_400) * 86_400;
  const times = [];
  for (let i = Math.ceil(min / step); i * step <= max && times.length < 100; i++) times.push(i * step);
  return times;
}

function nearest(points, x) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle + 1;
    else high = middle;
  }
  return points[Math.max(0, low - 1)];
}
