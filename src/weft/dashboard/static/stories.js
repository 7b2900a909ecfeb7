// What is told in words: what is wrong and what to do, text that the model wrote, the method and its changes.

import { find, make, tell } from "./dom.js";
import { bounded, plural, short, since } from "./words.js";

const NUM_ADVICE = 3;
const NUM_SAMPLES = 4;

export class Stories {
  constructor(history, moment) {
    Object.assign(this, { history, moment });
    this.isAllAdvice = false;
    this.isAllSamples = false;
    this.shown = {};
    find("advice-more").addEventListener("click", () => this._all("isAllAdvice"));
    find("samples-more").addEventListener("click", () => this._all("isAllSamples"));
  }

  refresh() {
    this._advice();
    this._samples();
    this._method();
  }

  _all(which) {
    this[which] = !this[which];
    this.shown = {};
    this.refresh();
  }

  /** Return the last rows of a list, newest first, or null where they are shown already. */
  _news(name, most, ...more) {
    const num = this.moment.count(name);
    const key = [num, most, ...more].join();
    if (this.shown[name] === key) return null;
    this.shown[name] = key;
    return this.history.rows[name].slice(0, num).reverse();
  }

  _advice() {
    const now = (peer) => (peer !== null && this.moment.isHere(peer) ? this.moment.state(peer)[2] : "");
    const states = this.history.rows.advice.slice(-50).map((row) => now(row[1]));
    const rows = this._news("advice", this.isAllAdvice, ...states);
    if (!rows) return;
    const distinct = [...new Map(rows.map((row) => [`${row[1]} ${row[2]}`, row]).reverse()).values()].reverse();
    find("advice-panel").hidden = distinct.length === 0;
    const some = this.isAllAdvice ? distinct : distinct.slice(0, NUM_ADVICE);
    find("advice").replaceChildren(...some.map((row) => this._counsel(row, now(row[1]))));
    more(find("advice-more"), distinct.length, NUM_ADVICE, this.isAllAdvice);
  }

  _counsel([at, peer, text, what], state) {
    const name = peer === null ? "" : this.history.name(peer);
    const now = state ? `By now ${bounded(name, 60)} is here again: ${bounded(state, 60)}.` : "";
    return make(
      "li",
      {},
      make(
        "p",
        { class: "wrong" },
        make("time", {}, since(at - this.history.start)),
        make("span", {}, bounded(text, 600)),
      ),
      make("p", { class: "remedy" }, `${bounded(what, 600)} ${now}`.trim()),
    );
  }

  _samples() {
    const rows = this._news("samples", this.isAllSamples);
    if (!rows) return;
    find("samples-none").hidden = rows.length > 0;
    const some = this.isAllSamples ? rows.slice(0, 100) : rows.slice(0, NUM_SAMPLES);
    find("samples").replaceChildren(...some.map((row) => this._sample(row)));
    more(find("samples-more"), rows.length, NUM_SAMPLES, this.isAllSamples);
  }

  _sample([at, round, prompt, text]) {
    const head = make("p", { class: "quiet" }, `Round ${round}, ${since(at - this.history.start)}`);
    const words = make("blockquote", {}, make("span", { class: "prompt" }, bounded(prompt, 600)), bounded(text));
    return make("li", {}, head, words);
  }

  _method() {
    const { run } = this.history;
    const rows = this._news("methods", JSON.stringify(run));
    if (!rows) return;
    const facts = [
      ["Method", run.method],
      ["Parameters", run.num_parameters && short(run.num_parameters)],
      ["Tokens in all", run.total_tokens && short(run.total_tokens)],
      ["Tokens a step", run.tokens_per_step && `${short(run.tokens_per_step)} of each peer`],
      ["Run", run.id && `${String(run.id).slice(0, 12)}`],
    ].filter(([, value]) => value);
    const pair = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, bounded(value, 300)));
    find("method").replaceChildren(...facts.map(pair));
    find("methods").replaceChildren(
      ...rows.map(([at, , text]) =>
        make("li", {}, make("time", {}, since(at - this.history.start)), make("span", {}, bounded(text, 600))),
      ),
    );
    tell(find("methods-head"), rows.length ? `${plural(rows.length, "change")}, newest first` : "No changes so far");
  }
}

function more(button, num, few, isAll) {
  button.hidden = num <= few;
  button.setAttribute("aria-expanded", String(isAll));
  tell(button, isAll ? "Show fewer" : `Show all ${num}`);
}
