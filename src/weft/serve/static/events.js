// Server-sent events out of text that comes in pieces, and what an answer is after each of them.

const MOST_PENDING = 4_000_000; // letters of one event: no answer's are as many

/** Cuts text into events, wherever the pieces of it end. */
export class Events {
  constructor() {
    this.rest = "";
    this.data = [];
  }

  /** Take a piece; return the data of the events that are whole by now. */
  take(piece) {
    const whole = [];
    const lines = (this.rest + piece).split(/\r\n|\n|\r(?!$)/); // a \r at the end may be half of a line's end
    this.rest = lines.pop();
    if (this.rest.length > MOST_PENDING) throw new Error("the server sends a line without an end");
    for (const line of lines) {
      if (line === "" && this.data.length) {
        whole.push(this.data.join("\n"));
        this.data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        this.data.push(line.slice(5).replace(/^ /, ""));
      } // else a comment, as `: still here`, or a field that says nothing here
    }
    return whole;
  }

  /** Nothing more comes; return the data of an event whose empty line was left out. */
  end() {
    return [...this.take("\n"), ...this.take("\n")];
  }
}

/** What is known of an answer before anything of it has come. */
export const BEGUN = Object.freeze({
  text: "",
  model: null,
  version: null, // system_fingerprint: which weights answered
  finish: null, // stop, length, ...
  numTokens: null,
  numRead: null, // tokens of the prompt
  course: null, // of what members of a run compute: whom it came by, as `weft` in a choice has it
  error: null, // {message, type, code}: the server's own word that it failed
  isWhole: false,
});

/** Whether an event says that nothing comes after it. */
export const isLast = (data) => data.trim() === "[DONE]";

/** Return an answer with one event's data added. */
export function fold(answer, data) {
  if (isLast(data)) return { ...answer, isWhole: true };
  let told;
  try {
    told = JSON.parse(data);
  } catch {
    return { ...answer, error: { message: "The server sent an event that is no JSON.", type: null, code: null } };
  }
  if (told === null || typeof told !== "object") return answer;
  if (told.error) return { ...answer, error: errorOf(told.error) };
  const choice = Array.isArray(told.choices) ? told.choices[0] : null;
  const text = choice?.delta?.content;
  const finish = choice?.finish_reason ?? answer.finish;
  return {
    ...answer,
    text: typeof text === "string" ? answer.text + text : answer.text,
    model: told.model ?? answer.model,
    version: told.system_fingerprint ?? answer.version,
    finish,
    numTokens: told.usage?.completion_tokens ?? answer.numTokens,
    numRead: told.usage?.prompt_tokens ?? answer.numRead,
    course: choice?.weft ?? answer.course,
    isWhole: answer.isWhole || finish !== null,
  };
}

/** Return an error as the API tells it, whatever a server made of the form. */
export function errorOf(told) {
  if (typeof told === "string") return { message: told, type: null, code: null };
  return {
    message: String(told?.message ?? ""),
    type: told?.type ?? null,
    code: told?.code === undefined || told.code === null ? null : String(told.code),
  };
}
