// Figures as words. Pure. What is not known is a dash.

const DASH = "–";

export function count(value) {
  return typeof value === "number" ? value.toLocaleString("en") : DASH;
}

export function ms(value) {
  if (typeof value !== "number") return DASH;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${count(Math.round(value))} ms` : `${value.toFixed(1)} ms`;
}

export function seconds(value) {
  if (typeof value !== "number") return DASH;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.floor(value / 60)} min` : `${Math.floor(value / 3600)} h`;
}

export function percent(share) {
  return typeof share === "number" ? `${Math.round(100 * share)} %` : DASH;
}

export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

export function clock(date) {
  return date.toLocaleTimeString("en-GB");
}

// A slab and a node are named by 56 characters, a request by 32.
export function short(name) {
  const text = String(name);
  const [kind, rest] = text.startsWith("slab:") ? ["slab:", text.slice(5)] : ["", text];
  return kind + (rest.length > 20 ? `${rest.slice(0, 12)}…` : rest);
}
