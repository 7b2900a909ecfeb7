// The API, as a page asks it: which models there are, and an answer as it comes.

import { BEGUN, errorOf, Events, fold, isLast } from "./events.js";
import { Fault, ofBareEnd, ofEvent, ofSilence, ofStatus } from "./faults.js";

/** One server.
 *
 * base    its address, as "v1"
 * key     returns the API key to send, or null
 * ask     fetch, or what a test has in its place
 */
export class Api {
  constructor(base, key, ask = (...given) => fetch(...given)) {
    this.base = base;
    this.key = key;
    this.ask = ask;
  }

  /** Return the names of the models. Raises a Fault. */
  async models() {
    const reply = await this.#reply("models", {});
    try {
      const told = await reply.json();
      return told.data.map((model) => String(model.id));
    } catch {
      throw new Fault("The server's list of models cannot be read.", "See whether it speaks the OpenAI API.");
    }
  }

  /** Yield an answer each time that there is more of it; the last one is whole. Raises a Fault.
   *
   * signal  of an AbortController: an answer that is stopped ends without a Fault
   */
  async *answer(body, signal) {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    let answer = BEGUN;
    try {
      const reply = await this.#reply("chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(asked),
        signal,
      });
      if (!reply.body) throw ofBareEnd(false);
      for await (const data of pieces(reply.body)) {
        answer = fold(answer, data);
        if (answer.error) throw ofEvent(answer.error, answer.text !== "");
        yield answer;
        if (isLast(data)) return;
      }
    } catch (error) {
      if (signal?.aborted) return;
      if (error instanceof Fault) throw error;
      if (answer.isWhole) return; // the text was, and only figures are missing
      throw answer.text ? ofBareEnd(true) : ofSilence(); // the line broke
    }
    if (!answer.isWhole && !signal?.aborted) throw ofBareEnd(answer.text !== "");
  }

  async #reply(path, options) {
    const key = this.key();
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let reply;
    try {
      reply = await this.ask(`${this.base}/${path}`, { ...options, headers, credentials: "same-origin" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw ofSilence();
    }
    if (reply.ok) return reply;
    const told = await reply.json().catch(() => null);
    const error = errorOf(told?.error ?? told?.detail ?? told?.message ?? "");
    throw ofStatus(reply.status, error, (name) => reply.headers.get(name), Boolean(key));
  }
}

async function* pieces(body) {
  const events = new Events();
  const reader = body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      yield* done ? events.end() : events.take(decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // the server stops, too
  }
}
