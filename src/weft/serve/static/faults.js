// What went wrong, in words, and what to do about it.

import { bounded } from "./words.js";

const MOST_LETTERS = 400; // of what a server says itself

/** An answer that did not come, or not whole.
 *
 * words     what happened
 * advice    what to do
 * needsKey  whether an API key would help
 */
export class Fault extends Error {
  constructor(words, advice, { needsKey = false } = {}) {
    super(words);
    this.words = words;
    this.advice = advice;
    this.needsKey = needsKey;
  }
}

/** Of an answer with a status that is no success.
 *
 * error     {message, type, code} of its body
 * header    returns a header's value, or null
 * hasKey    whether a key was sent
 */
export function ofStatus(status, error, header, hasKey) {
  const said = saying(error.message);
  const again = whenAgain(header);
  if (status === 401) {
    return hasKey
      ? new Fault("The server does not take this API key.", "Enter another one.", { needsKey: true })
      : new Fault("The server wants an API key.", "Enter yours; whoever runs the server gives them out.", {
          needsKey: true,
        });
  }
  const known = ofCode(error, again);
  if (known) return known;
  if (status === 403) {
    return new Fault(`This API key may not do that.${said}`, "Choose another model, or enter another key.", {
      needsKey: true,
    });
  }
  if (status === 404) {
    return new Fault(`The server does not know what was asked for.${said}`, "Choose another model.");
  }
  if (status === 408) return new Fault(`The answer took too long.${said}`, `Retry ${again}.`);
  if (status === 413) {
    return new Fault(`The conversation is larger than the server takes.${said}`, "Begin a new one, or shorten it.");
  }
  if (status === 429) {
    if (header("x-should-retry") === "false") {
      return new Fault(`The server never takes so much at once.${said}`, "Shorten it, or ask for fewer tokens.");
    }
    return new Fault(`The server takes no more requests for the moment.${said}`, `Retry ${again}.`);
  }
  if (status === 503) return new Fault(`The server cannot answer now.${said}`, `Retry ${again}.`);
  if (status >= 500) {
    const id = header("x-request-id");
    const which = id ? ` The request was ${bounded(id, 80)}.` : "";
    return new Fault(`The server failed.${said}`, `Retry; if it fails again, tell whoever runs the server.${which}`);
  }
  return new Fault(`The server refuses the request (${status}).${said}`, "Change what it names, then retry.");
}

/** Of an event inside a stream. */
export function ofEvent(error, hasText) {
  const known = ofCode(error, "in a moment");
  if (known) return known;
  const where = hasText ? "in the middle of the answer" : "before the answer began";
  return new Fault(`The server failed ${where}.${saying(error.message)}`, "Retry: it begins the answer anew.");
}

/** Of a stream that ended without a word, which is never an answer's end. */
export function ofBareEnd(hasText) {
  const what = hasText ? "The answer broke off: its end is missing." : "The server ended the answer before it began.";
  return new Fault(what, "Retry. If that does not help, see whether the server still runs.");
}

/** Of a server that nothing came from. */
export function ofSilence() {
  return new Fault(
    "The server cannot be reached.",
    "See whether it still runs and this machine is connected, then retry.",
  );
}

function ofCode(error, again) {
  const said = saying(error.message);
  switch (error.code) {
    case "context_length_exceeded":
      return new Fault(
        `The conversation is longer than the model reads.${said}`,
        "Shorten or edit a message, ask for fewer tokens, or begin a new conversation.",
      );
    case "model_not_found":
      return new Fault(`The server does not have this model.${said}`, "Choose another model.");
    case "host_not_allowed":
    case "origin_not_allowed":
      return new Fault(
        `The server does not answer a page at this address.${said}`,
        "Open the address that the server printed when it started.",
      );
    case "insufficient_quota":
      return new Fault(
        `What this API key may use is spent.${said}`,
        "Wait until it is given more, or enter another key.",
        { needsKey: true },
      );
    case "no_path":
      return new Fault(
        `Members of the run cannot compute the answer just now.${said}`,
        `Retry ${again}: members that are missing may be back, and those that are busy may be free.`,
      );
    default:
      return null;
  }
}

function saying(message) {
  const text = bounded(message, MOST_LETTERS).trim();
  return text ? ` It says: ${text}${/[.!?…]$/.test(text) ? "" : "."}` : "";
}

/** Return when to try again, of what headers say. */
function whenAgain(header) {
  const ms = Number.parseFloat(header("retry-after-ms") ?? "");
  const s = Number.isFinite(ms) ? ms / 1000 : Number.parseFloat(header("retry-after") ?? "");
  if (!Number.isFinite(s) || s < 0) return "in a moment";
  return s < 1.5 ? "in a second" : `in ${Math.ceil(s)} seconds`;
}
