// The slider over time: it replays what was, at any speed, and comes back to what is.

import { clear, find, tell } from "./dom.js";
import { colours } from "./theme.js";
import { clock, since } from "./words.js";

const STEPS = 2_000; // of the slider

export class Replay {
  constructor(history, moment, changed) {
    Object.assign(this, { history, moment, changed });
    this.isPlaying = false;
    this.slider = find("time");
    this.slider.max = String(STEPS);
    this.slider.addEventListener("input", () => this._go(this._time(Number(this.slider.value))));
    this.slider.addEventListener("keydown", (event) => this._key(event));
    find("play").addEventListener("click", () => this._play(!this.isPlaying));
    find("live").addEventListener("click", () => {
      this._play(false);
      this._go(Infinity);
    });
  }

  get speed() {
    return Number(find("speed").value);
  }

  /** Carry time forward; return whether it went. */
  frame(seconds) {
    if (!this.isPlaying) return false;
    const at = this.moment.at + seconds * this.speed;
    if (at < this.history.end) this.moment.at = at;
    else {
      this.moment.at = Infinity;
      this._play(false);
    }
    return true;
  }

  refresh() {
    const { start, end, isOver } = this.history;
    if (!this.history.hasRows) return;
    const { time } = this.moment;
    const isNow = this.moment.at >= end;
    this.slider.value = String(end > start ? Math.round(((time - start) / (end - start)) * STEPS) : STEPS);
    this.slider.setAttribute("aria-valuetext", `${since(time - start)} of ${since(end - start)}`);
    tell(find("time-now"), since(time - start));
    tell(find("time-end"), since(end - start));
    find("time-now").title = clock(time);
    find("live").hidden = isOver;
    find("live").setAttribute("aria-pressed", String(isNow));
    this._drawMarks();
  }

  _time(step) {
    const { start, end } = this.history;
    return step >= STEPS ? Infinity : start + ((end - start) * step) / STEPS;
  }

  _go(at) {
    this.moment.at = at;
    this.changed();
  }

  _play(isPlaying) {
    this.isPlaying = isPlaying && this.history.hasRows;
    if (this.isPlaying && this.moment.at >= this.history.end) this.moment.at = this.history.start; // from the beginning
    find("play").setAttribute("aria-label", this.isPlaying ? "Pause" : "Play");
    find("play").dataset.is = this.isPlaying ? "pause" : "play";
    this.changed();
  }

  _key(event) {
    if (event.key !== " ") return;
    event.preventDefault();
    this._play(!this.isPlaying);
  }

  /** Draw where warnings and errors were, so that a reader finds them. */
  _drawMarks() {
    const canvas = find("time-marks");
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const { events } = this.history.rows;
    const { start, end } = this.history;
    const key = [events.length, width, colours().bad, end].join();
    if (key === this.drawn) return;
    this.drawn = key;
    const context = clear(canvas, width, height);
    const worst = new Map();
    for (const [at, , severity] of events) {
      if (severity < 2 || end <= start) continue;
      const x = Math.round(((at - start) / (end - start)) * (width - 2));
      worst.set(x, Math.max(worst.get(x) ?? 0, severity));
    }
    for (const [x, severity] of worst) {
      context.fillStyle = severity > 2 ? colours().bad : colours().warn;
      context.fillRect(x, severity > 2 ? 0 : height / 2, 1.5, height);
    }
  }
}
