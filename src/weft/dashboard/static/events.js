// What happened, newest first: searched in, and narrowed to how much it concerns and whom.

import { find, make, tell } from "./dom.js";
import { count } from "./history.js";
import { List } from "./list.js";
import { bounded, clock, plural, since } from "./words.js";

const SEVERITIES = ["routine", "note", "warning", "error"];
const PATIENCE_MS = 120; // after a key, before it searches

export class Events {
  constructor(history, moment, selection) {
    Object.assign(this, { history, moment, selection });
    this.matches = []; // rows that fit, oldest first
    this.num = 0; // of those, that are not after the time that is shown
    this.seen = 0; // rows that were looked at
    this.moves = 0;
    this.numNamed = 0;
    this.list = new List(find("events"), {
      id: "event",
      make: eventRow,
      fill: (row, i) => this._fill(row, this._nth(i)),
      pick: (i) => this._tell(this._nth(i)),
    });
    find("event-search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this._anew(), PATIENCE_MS);
    });
    for (const id of ["event-severity", "event-peer"]) find(id).addEventListener("change", () => this._anew());
  }

  refresh() {
    const { events } = this.history.rows;
    if (this.moves !== this.history.moves.events) this.seen = 0;
    this.moves = this.history.moves.events;
    if (this.seen === 0) this.matches = [];
    const fits = this._filter();
    for (; this.seen < events.length; this.seen++) if (fits(events[this.seen])) this.matches.push(events[this.seen]);
    if (this.numNamed !== this.history.numCalls) this._namePeers();
    this._show();
  }

  _nth(i) {
    return this.matches[this.num - 1 - i];
  }

  _anew() {
    this.seen = 0;
    find("events").scrollTop = 0;
    this.list.current = -1;
    tell(find("event-words"), "");
    this.refresh();
  }

  /** Return what tells whether a row fits. */
  _filter() {
    const words = find("event-search").value.trim().toLowerCase();
    const least = Number(find("event-severity").value);
    const peer = find("event-peer").value === "" ? null : Number(find("event-peer").value);
    return ([, who, severity, type, text]) =>
      severity >= least &&
      (peer === null || who === peer) &&
      (!words || text.toLowerCase().includes(words) || type.toLowerCase().includes(words));
  }

  _show() {
    const before = this.num;
    this.num = count(this.matches, this.moment.at);
    const box = find("events");
    const more = this.num - before;
    // What comes goes on top; who reads further down keeps the place.
    if (more > 0 && box.scrollTop > 0 && this.list.height) {
      this.list.show(this.num);
      box.scrollTop += more * this.list.height;
      if (this.list.current >= 0) this.list.current += more;
    }
    this.list.show(this.num);
    const all = this.moment.count("events");
    tell(
      find("event-count"),
      this.num === all ? plural(all, "event") : `${plural(this.num, "event")} of ${plural(all, "event").split(" ")[0]}`,
    );
    find("events-none").hidden = this.num > 0;
  }

  _fill(row, event) {
    if (!event) return;
    const [at, peer, severity, type, text] = event;
    const [when, how, who, what] = row.children;
    tell(when, since(at - this.history.start));
    when.title = clock(at);
    how.dataset.severity = String(severity);
    tell(how, SEVERITIES[severity] ?? "note");
    tell(who, bounded(this.history.name(peer), 40));
    tell(what, bounded(text, 240));
    what.title = bounded(type, 60);
  }

  _tell(event) {
    if (!event) return;
    const [at, peer, , type, text] = event;
    const when = `${clock(at)}, ${since(at - this.history.start)} after the start`;
    tell(
      find("event-words"),
      `${bounded(text)} (${bounded(type, 60)}, ${bounded(this.history.name(peer), 60)}, ${when})`,
    );
  }

  _namePeers() {
    const box = find("event-peer");
    const kept = box.value;
    const names = this.history.peers.map((_, peer) => [bounded(this.history.name(peer), 60), peer]);
    names.sort((a, b) => a[0].localeCompare(b[0], "en"));
    const options = names.map(([name, peer]) => make("option", { value: peer }, name));
    box.replaceChildren(make("option", { value: "" }, "every peer"), ...options);
    box.value = kept;
    this.numNamed = this.history.numCalls;
  }
}

function eventRow() {
  const cells = ["when", "how", "who", "what"].map((name) => make("span", { class: name, role: "gridcell" }));
  return make("div", {}, ...cells);
}
