// Messages as elements. What people and models wrote is set as text, so it can never become markup.

import { make, tell } from "./dom.js";
import { blocks } from "./text.js";
import { bounded, duration, plural, three, whole } from "./words.js";

/** Show a text in an element; what stands there already and has not changed is left alone. */
export function show(element, text) {
  const wanted = blocks(text);
  while (element.childElementCount > wanted.length) element.lastElementChild.remove();
  wanted.forEach((block, index) => {
    const there = element.children[index];
    const kind = `${block.kind} ${block.language}`;
    if (there && there.dataset.kind === kind) {
      tell(block.kind === "code" ? there.querySelector("code") : there, block.text);
      return;
    }
    const made = block.kind === "code" ? code(block) : make("p", {}, block.text);
    made.dataset.kind = kind;
    if (there) there.replaceWith(made);
    else element.append(made);
  });
}

function code({ text, language }) {
  const name = language || "code";
  return make(
    "figure",
    { class: "code" },
    language ? make("figcaption", {}, language) : null,
    make("pre", { tabindex: "0", role: "region", "aria-label": name }, make("code", {}, text)),
  );
}

/** Return the element of a message with its buttons: [{label, act}]. */
export function message({ role, content, note }, buttons = []) {
  const text = make("div", { class: "text" });
  show(text, content);
  return make(
    "article",
    { class: "message", "data-role": role },
    make("h2", {}, role === "user" ? "You" : note?.model || "Model"),
    text,
    note ? make("p", { class: "note" }, words(note)) : null,
    note?.course ? make("p", { class: "note course" }, course(note.course)) : null,
    row(buttons),
  );
}

/** Return a message that is being changed; `send` is given the new text. */
export function editor(content, send, cancel) {
  const area = make("textarea", { rows: "3", "aria-label": "Edit the message" });
  area.value = content;
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (isSending(event)) {
      event.preventDefault();
      if (area.value.trim()) send(area.value);
    }
  });
  const buttons = [
    { label: "Send from here", act: () => area.value.trim() && send(area.value) },
    { label: "Cancel", act: cancel },
  ];
  return make("article", { class: "message", "data-role": "user" }, make("h2", {}, "You"), area, row(buttons));
}

/** Return what went wrong with what to do; `role="alert"` reads it out. */
export function fault({ words: what, advice }, again) {
  const retry = make("button", { type: "button" }, "Retry");
  retry.addEventListener("click", again);
  return make(
    "div",
    { class: "fault", role: "alert" },
    make("p", { class: "wrong" }, what),
    make("p", {}, advice),
    retry,
  );
}

/** Whether a key sends: Enter, but not in the middle of writing a character with several keys. */
export const isSending = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.altKey && !event.ctrlKey && !event.metaKey && !isComposing(event);

const isComposing = (event) => event.isComposing || event.keyCode === 229; // Safari ends the character before the key

/** How an answer came, in words. */
export function words(note) {
  const ends = {
    length: "cut off at the most tokens of an answer",
    content_filter: "cut off by the server's filter",
  };
  return [
    note.isStopped ? "stopped" : null,
    note.fault ? "broke off" : null,
    ends[note.finish] ?? null,
    Number.isFinite(note.tokens_per_s) ? `${three(note.tokens_per_s)} tokens/s` : null,
    Number.isFinite(note.first_s) ? `first after ${first(note.first_s)}` : null,
    Number.isFinite(note.numTokens) ? `${whole(note.numTokens)} tokens` : null,
    note.version ? `version ${note.version}` : null,
  ]
    .filter((each) => each !== null)
    .join(" · ");
}

const WHY = {
  parted: "its link broke",
  silent: "it fell silent",
  declined: "it did not take it on",
  leaving: "it left",
  unread: "the answer was read slowly, and rested",
  "no room": "it had no room",
  "not computed": "it could not compute",
  "wrong rows": "what it was given was wrong",
  "old weights": "it let go of the weights",
};
const MOST_TOLD = 200; // members, and changes
const MOST_LETTERS = 40; // of what stands in the place of a word or a name that is known

/** Whom an answer came by, in words: members of a run by stage, where others took over, and whose weights.
 *
 * told  {members, rounds: [{round, after_tokens}], mends: [{stage, before, member, after_tokens, why, pause_s}], num_mends}
 */
export function course(told) {
  const members = list(told.members);
  const mends = list(told.mends);
  const stages = members.map((member, index) => {
    const here = mends.filter((each) => each?.stage === index + 1);
    const first = here.length ? name(here[0].before) : name(member);
    const words = [first, ...here.map(mended)].join(" → ");
    return members.length > 1 ? `stage ${index + 1}: ${words}` : `computed by ${words}`;
  });
  const left = told.num_mends - mends.length;
  const rounds = list(told.rounds).map((each, index) => {
    const after = index ? ` after ${tokens(each?.after_tokens)}` : "";
    return `${whole(each?.round)}${after}`;
  });
  return [
    ...stages,
    left > 0 ? `${whole(left)} changes before these` : null,
    rounds.length ? `weights of round ${rounds.join(", then ")}` : null,
  ]
    .filter((each) => each !== null)
    .join(" · ");
}

function mended({ member, after_tokens: after, why, pause_s: pause }) {
  const when = after > 0 ? `after ${tokens(after)}` : "before the first token";
  const long = Number.isFinite(pause) ? `, ${duration(pause)}` : "";
  return `${name(member)} ${when}${long} (${WHY[why] ?? bounded(why, MOST_LETTERS)})`;
}

const list = (told) => (Array.isArray(told) ? told.slice(0, MOST_TOLD) : []);
const name = (told) => bounded(told, MOST_LETTERS);
const tokens = (number) => plural(number, "token");

const first = (seconds) => (seconds < 0.9995 ? `${whole(seconds * 1000)}\u00a0ms` : duration(seconds));

function row(buttons) {
  if (!buttons.length) return null;
  const made = buttons.map(({ label, act }) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", act);
    return button;
  });
  return make("div", { class: "buttons" }, ...made);
}
