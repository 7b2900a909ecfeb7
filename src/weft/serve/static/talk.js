// A conversation, and what becomes of it: each function returns another one and leaves its own as it was.
//
//   {id, at, model, settings: {system, temperature, maxTokens}, messages: [{role, content, note?}]}
//
// A note says how an answer came: {model, version, numTokens, first_s, tokens_per_s, finish, isStopped, fault, course}.

import { bounded } from "./words.js";

export const SETTINGS = Object.freeze({ system: "", temperature: null, maxTokens: null }); // null: as the server has it
const MOST_TITLE = 60;

export function begun(id, at, model = null, settings = SETTINGS) {
  return { id, at, model, settings: { ...settings }, messages: [] };
}

export function asked(talk, content, at) {
  return { ...talk, at, messages: [...talk.messages, { role: "user", content }] };
}

/** An answer that was given, whole or not; one without a letter is none. */
export function answered(talk, content, note, at) {
  if (content === "") return talk;
  return { ...talk, at, messages: [...talk.messages, { role: "assistant", content, note }] };
}

/** Another question in the place of one; what came after it is gone. */
export function edited(talk, index, content, at) {
  if (talk.messages[index]?.role !== "user") throw new Error(`message ${index} is no question`);
  return asked({ ...talk, messages: talk.messages.slice(0, index) }, content, at);
}

/** The last question without its answer. */
export function unanswered(talk) {
  const last = talk.messages.findLastIndex((message) => message.role === "user");
  return { ...talk, messages: talk.messages.slice(0, last + 1) };
}

export function isWaiting(talk) {
  return talk.messages.at(-1)?.role === "user";
}

export function title(talk) {
  const first = talk.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n", 1)[0];
  return line ? bounded(line, MOST_TITLE) : "New conversation";
}

/** What the API is asked for the next answer. */
export function request(talk) {
  const { system, temperature, maxTokens } = talk.settings;
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content } of talk.messages) {
    const last = messages.at(-1);
    // a question that was never answered belongs to the next one: many templates want turns to alternate
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  return {
    model: talk.model,
    messages,
    ...(temperature === null ? {} : { temperature }),
    ...(maxTokens === null ? {} : { max_tokens: maxTokens }),
  };
}

/** A conversation as a file: what a program reads, messages as the API takes them, and nothing of this browser. */
export function exported(talk) {
  const { messages, ...asked } = request({ ...talk, messages: [] });
  const all = talk.messages.map(({ role, content, note }) => ({ role, content, ...(note ? { note } : {}) }));
  return `${JSON.stringify({ format: "weft-chat", version: 1, ...asked, messages: [...messages, ...all] }, null, 2)}\n`;
}

/** A conversation as a browser kept it; null where that is none. */
export function read(told) {
  const isTalk =
    told !== null &&
    typeof told === "object" &&
    typeof told.id === "string" &&
    Number.isFinite(told.at) &&
    Array.isArray(told.messages) &&
    told.messages.every(
      (each) => (each?.role === "user" || each?.role === "assistant") && typeof each?.content === "string",
    );
  return isTalk ? { ...told, model: told.model ?? null, settings: { ...SETTINGS, ...told.settings } } : null;
}
