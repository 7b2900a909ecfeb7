// One answer as it is written: who writes it, what is there so far, how fast it came.

import { BEGUN } from "./events.js";
import { Fault } from "./faults.js";

const LEAST_S = 0.1; // what came within less came in one piece, which says nothing of speed

export class Run {
  /**
   * now      returns seconds
   * changed  is called each time that there is more
   */
  constructor(api, now, changed) {
    this.api = api;
    this.now = now;
    this.changed = changed;
    this.answer = BEGUN;
    this.fault = null;
    this.isStopped = false;
    this.control = new AbortController();
    this.began = now();
    this.first = null; // when the first letter came
    this.last = null; // and the last
  }

  /** Ask, and take the answer until it ends. */
  async go(body) {
    try {
      for await (const answer of this.api.answer(body, this.control.signal)) {
        if (answer.text.length > this.answer.text.length) {
          this.last = this.now();
          this.first ??= this.last;
        }
        this.answer = answer;
        this.changed();
      }
    } catch (error) {
      this.fault = error instanceof Fault ? error : new Fault(`The page itself failed: ${error.message}`, "Reload it.");
    }
  }

  /** What is there stays. */
  stop() {
    this.isStopped = true;
    this.control.abort();
  }

  get note() {
    const { model, version, finish, numTokens, course } = this.answer;
    const span = this.last - this.first;
    return {
      model,
      version,
      finish,
      numTokens,
      ...(course === null ? {} : { course }),
      first_s: this.first === null ? null : this.first - this.began,
      tokens_per_s: numTokens > 1 && span >= LEAST_S ? (numTokens - 1) / span : null,
      isStopped: this.isStopped && !this.answer.isWhole,
      fault: this.fault?.words ?? null,
    };
  }
}
