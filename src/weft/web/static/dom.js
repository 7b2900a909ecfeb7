// Making elements. What comes from peers is set as text, so it can never become markup.

/** make("p", {class: "note", hidden: true}, "text", element) */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function find(id) {
  return document.getElementById(id);
}

/** Set a text where it differs, so that screen readers are not told again. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Size a canvas for the screen's pixels and return its context, cleared, in CSS pixels. */
export function clear(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

export const wantsStillness = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;
