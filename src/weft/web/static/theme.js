// Light and dark: the system's choice until somebody makes another, and the colours for what is drawn.

import { find } from "./dom.js";

const KEY = "weft-theme";
const NAMES = [
  "ground",
  "surface",
  "line",
  "text",
  "quiet",
  "faint",
  "train",
  "heldout",
  "good",
  "wait",
  "bad",
  "warn",
  "exchange",
  "idle",
  "work",
  "done",
];

let known = null;
const watchers = [];

/** Return the colours of the theme by name, as canvas takes them. */
export function colours() {
  if (known) return known;
  const probe = find("probe");
  known = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  known.font = getComputedStyle(document.body).fontFamily;
  return known;
}

export function onTheme(call) {
  watchers.push(call);
}

export function startTheme() {
  const button = find("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const changed = () => {
    known = null;
    button.setAttribute("aria-pressed", String(isDark()));
    for (const call of watchers) call();
  };
  const kept = recall();
  if (kept) document.documentElement.dataset.theme = kept;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    keep(document.documentElement.dataset.theme);
    changed();
  });
  system.addEventListener("change", changed);
  changed();
}

// A browser may forbid a page to keep anything.
function recall() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "dark" || kept === "light" ? kept : null;
  } catch {
    return null;
  }
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // it lasts until the page is closed
  }
}
