// Numbers and names as people read them.

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return unit === "B" ? `${n} B` : `${n < 10 ? n.toFixed(1) : n.toFixed(0)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60000) return seconds(value / 1000);
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`;
}

export function seconds(value) {
  const s = Math.max(0, Math.floor(value));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const rate = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0));
export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString([], { hour12: false });
export const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
export const shortId = (id) => (id.length <= 12 ? id : `…${id.slice(-8)}`);

/** "4:8" -> [4, 8] */
export const range = (text) => text.split(":").map(Number);
/** "4:8" -> "4–7", as people count layers. */
export const layerText = (text) => { const [start, end] = range(text); return end - start === 1 ? `${start}` : `${start}–${end - 1}`; };

/** A sentence of the node's, with its layer ranges as people count. */
export const layersIn = (sentence) => sentence.replace(/\d+:\d+/g, layerText);

/** A node's hue follows from its id: the same in every browser and after every restart. None is near the red of a failure. */
export function hue(nodeId) {
  let hash = 2166136261;
  for (let i = 0; i < nodeId.length; i++) hash = Math.imul(hash ^ nodeId.charCodeAt(i), 16777619);
  return { "--hue": `oklch(var(--node-light) .1 ${60 + 15 * ((hash >>> 8) % 20)})` };
}
