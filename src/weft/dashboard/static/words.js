// Figures as people read them.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function amount(count) {
  for (const [size, prefix] of UNITS) if (Math.abs(count) >= size) return `${short(count / size)}${prefix}`;
  return short(count);
}

export function bytes(count) {
  for (const [size, prefix] of UNITS) if (count >= size) return `${short(count / size)} ${prefix}B`;
  return `${Math.round(count)} B`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole >= 172800) return `${(whole / 86400).toFixed(1)} days`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}`;
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

export function percent(share, digits = 0) {
  return `${(100 * share).toFixed(digits)} %`;
}

function short(value) {
  const size = Math.abs(value);
  return size >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3);
}
