// Messages as elements. What people and models wrote is set as text, so it can never become markup.

import { make, tell } from "./dom.js";
import { blocks } from "./text.js";
import { duration, three, whole } from "./words.js";

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
