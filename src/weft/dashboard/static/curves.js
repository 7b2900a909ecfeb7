// The curves: loss, bytes beside data-parallel training, utilisation; and a sentence that tells each.

import { Chart } from "./chart.js";
import { find, tell } from "./dom.js";
import { count, last } from "./history.js";
import { median } from "./moment.js";
import { bounded, duration, nats, natsPerByte, nbytes, per, percent, plural, short, since, three, tick, whole } from "./words.js";

const MOST_NAMED = 4;
const NUM_RECENT = 10; // rounds that the figure for utilisation is taken over

export class Curves {
  constructor(history, moment) {
    this.history = history;
    this.moment = moment;
    this.axis = "tokens";
    this.loss = new Chart(find("loss"), find("loss-legend"));
    this.traffic = new Chart(find("traffic"), find("traffic-legend"));
    this.usage = new Chart(find("usage"), find("usage-legend"));
    find("loss-axis").addEventListener("change", (event) => {
      this.axis = event.target.value;
      this.loss.under = null;
      this.draw();
    });
  }

  draw() {
    if (!this.history.hasRows) return;
    this._drawLoss();
    this._drawTraffic();
    this._drawUsage();
  }

  _drawLoss() {
    const { train, heldout } = this.history.rows;
    const place = this._places();
    const points = (rows) => rows.map((row) => [place(row), row[2]]);
    const { time } = this.moment;
    this.loss.draw({
      series: [
        { name: "train", colour: "train", points: points(train) },
        { name: "held-out", colour: "heldout", points: points(heldout), isDotted: true },
      ],
      x: { tokens: { format: tick }, time: { format: since, isTime: true }, bytes: { format: (x) => tick(x, "B") } }[
        this.axis
      ],
      y: { format: tidy, formatValue: (y) => y.toFixed(3) },
      x_now: this.moment.at < this.history.end ? place([time, this.moment.tokens]) : Infinity,
    });
    tell(find("loss-head"), `Loss, ${per(this._lossOf())}`);
    tell(find("loss-words"), this._lossWords());
  }

  /** Return what tells a row's place on the chosen axis. */
  _places() {
    if (this.axis === "tokens") return (row) => row[1];
    if (this.axis === "time") return (row) => row[0] - this.history.start;
    return (row) => last(this.history.rows.bytes, row[0])?.[2] ?? 0;
  }

  /** What a loss is of: a token, or a pair of answers. */
  _lossOf() {
    return this.history.run.loss_of ?? "token";
  }

  _lossWords() {
    const { train } = this.history.rows;
    const of = this._lossOf();
    const now = this.moment.last("train");
    if (!now) return "No loss is known yet.";
    const held = this.moment.heldout;
    const first = train[0][2];
    const what = `Training loss is ${nats(now[2], of)} after ${short(now[1])} tokens, ${
      now[2] <= first ? "down" : "up"
    } from ${first.toFixed(3)}.`;
    if (!held) return `${what} No held-out loss is known yet.`;
    const pairs = held[5]?.accuracy === undefined ? "" : `, and ${percent(held[5].accuracy)} of the pairs are ranked right`;
    const perByte = typeof held[3] === "number" ? `, ${natsPerByte(held[3])}` : "";
    return `${what} Held-out loss after round ${whole(held[4])} is ${nats(held[2], of)}${perByte}${pairs}.`;
  }

  _drawTraffic() {
    const rows = this.history.rows.bytes;
    const { start } = this.history;
    const points = (column) => rows.filter((row) => row[column] > 0).map((row) => [row[0] - start, row[column]]);
    this.traffic.draw({
      series: [
        { name: "ring DDP", colour: "done", points: points(3) },
        { name: "this run", colour: "train", points: points(2) },
      ],
      x: { format: since, isTime: true },
      y: { format: (y) => tick(y, "B"), formatValue: nbytes, isLog: true },
      x_now: this._now(),
    });
    const { moved } = this.moment;
    tell(find("traffic-figure"), trafficFigure(moved));
    tell(find("traffic-words"), trafficWords(moved, this._whose()));
  }

  /** Return whose bytes are known, in words. */
  _whose() {
    const { heard } = this.moment;
    if (!heard.length || heard.length > MOST_NAMED) return plural(heard.length, "peer");
    const names = heard.map((peer) => bounded(this.history.name(peer), 40));
    return [names.slice(0, -1).join(", "), names.at(-1)].filter(Boolean).join(" and ");
  }

  _drawUsage() {
    const usage = this.moment.usage;
    this.usage.draw({
      series: [
        { name: "by round", colour: "work", points: usage.map(([at, share]) => [at - this.history.start, share]) },
      ],
      x: { format: since, isTime: true },
      y: { format: percent, min: 0, max: 1 },
      x_now: this._now(),
    });
    const num = count(usage, this.moment.at);
    const recent = usage.slice(Math.max(0, num - NUM_RECENT), num).map(([, share]) => share);
    const words = "of the median peer's time went into training steps";
    tell(find("usage-figure"), recent.length ? percent(median(recent)) : "");
    tell(
      find("usage-words"),
      recent.length
        ? `${words}, over the last ${plural(recent.length, "round")}.`
        : "It is known after the second round.",
    );
  }

  _now() {
    return this.moment.at < this.history.end ? this.moment.time - this.history.start : Infinity;
  }
}

function tidy(y) {
  return String(Number(y.toPrecision(3)));
}

/** Return how many times what was moved ring DDP would have moved. */
function times(moved) {
  return moved && moved[0] > 0 && moved[1] > 0 ? moved[1] / moved[0] : null;
}

function trafficFigure(moved) {
  const ratio = times(moved);
  return ratio === null ? "" : `${three(ratio)}×`;
}

function trafficWords(moved, whose) {
  if (!moved) return "No bytes are counted yet.";
  const what = `${whose} sent and received ${nbytes(moved[0])}`;
  if (times(moved) === null) return `${what} so far.`;
  return `as much for ring DDP: ${what}; ring DDP would have moved ${nbytes(moved[1])} for the same rounds.`;
}

/** Return the time left in words, for the header. */
export function leftWords(moment) {
  const left_s = moment.left_s;
  if (left_s === 0) return "done";
  if (moment.history.isOver && moment.at >= moment.history.end) return "ended";
  return left_s === null ? "–" : duration(left_s);
}
