// What a model wrote, cut for the eye and for the ear: prose and fenced code, and sentences as they become whole.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;

/** Return the blocks of a text: {kind: "prose" | "code", text, language}. A fence that is not closed yet is code. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const close = (kind, language = "") => {
    const inner = lines.join("\n");
    if (kind === "code" || inner.trim()) {
      found.push({ kind, text: kind === "code" ? inner : inner.replace(/^\n+|\n+$/g, ""), language });
    }
    lines = [];
  };
  for (const line of text.split("\n")) {
    const match = FENCE.exec(line);
    if (fence === null && match) {
      close("prose");
      fence = { mark: match[1], language: match[2].trim().split(/\s/)[0] };
    } else if (fence !== null && match && match[1].startsWith(fence.mark) && !match[2].trim()) {
      close("code", fence.language);
      fence = null;
    } else {
      lines.push(line);
    }
  }
  close(fence === null ? "prose" : "code", fence?.language);
  return found;
}

const SENTENCE = /[^]*?(?:[.!?…]["'”’)\]]*(?=\s)|[。！？]|\n)/y;

/** Gives a growing text sentence by sentence, so that a screen reader is not told each word by itself. */
export class Sentences {
  constructor() {
    this.told = 0;
  }

  /** Return the sentences that are whole by now and were not given before; with `isOver` all that is left. */
  take(text, isOver = false) {
    const found = [];
    SENTENCE.lastIndex = this.told;
    for (let match = SENTENCE.exec(text); match; match = SENTENCE.exec(text)) {
      this.told = SENTENCE.lastIndex;
      found.push(match[0]);
    }
    if (isOver) {
      found.push(text.slice(this.told));
      this.told = text.length;
    }
    return found.map((each) => each.trim()).filter((each) => each !== "");
  }
}
