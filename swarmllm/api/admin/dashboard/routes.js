// One pipeline as a person sees it: where each part of the time went.

import { h } from "./dom.js";
import { hue, layerText, ms, plural, shortId } from "./format.js";

const nameOf = (stage) => stage.nickname || shortId(stage.node);

/** Time per token as a bar: per stage computing, waiting, and the hop to the next. */
export function timeBar(route) {
  const parts = route.flatMap((stage) => [
    { what: `${nameOf(stage)} computes`, className: "", value: stage.compute_ms_per_token, node: stage.node },
    { what: `${nameOf(stage)} queues and passes on`, className: "other", value: stage.overhead_ms_per_token, node: stage.node },
    { what: `network after ${nameOf(stage)}`, className: "net", value: stage.network_ms_per_token, node: stage.node },
  ]).filter((part) => part.value > 0);
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!total) return null;
  return h("div", { class: "split", role: "img", "aria-label": `${ms(total)} per token: ${parts.map((part) => `${part.what} ${ms(part.value)}`).join(", ")}` },
    parts.map((part) => h("i", { class: part.className, title: `${part.what}: ${ms(part.value)} per token`, style: { ...hue(part.node), flex: `${part.value} 0 0` } })));
}

/** Who encoded the pictures or sounds of a prompt, one stop for each node; those of an earlier prompt nobody encodes again. */
function encoders(encoded) {
  const stops = new Map();
  for (const { node, nickname, encode_ms: took, kept } of encoded) {
    if (kept) continue;
    const stop = stops.get(node) ?? { node, nickname, n: 0, took: 0 };
    stops.set(node, { ...stop, n: stop.n + 1, took: stop.took + took });
  }
  return [...stops.values()];
}

/** The stages in order, with their layers and times; before them who encoded the pictures and sounds. */
export function hops(route, { times = true, pictures = [], sounds = [] } = {}) {
  const isRing = route.some((stage) => stage.network_ms_per_token > 0);
  const stops = [...encoders(pictures).map((stop) => ({ ...stop, did: `looked at ${plural(stop.n, "picture")}` })), ...encoders(sounds).map((stop) => ({ ...stop, did: `heard ${plural(stop.n, "sound")}` }))];
  return h("ol", { class: "hops", "aria-label": "Route" }, stops.map((stop) => h("li", { class: "looked" },
    h("span", { class: "mmproj has", style: hue(stop.node) }),
    h("span", { class: "cut" }, nameOf(stop)),
    h("span", { class: "muted" }, stop.did),
    times && h("span", { class: "muted" }, ms(stop.took)),
    h("span", { class: "hop" }, "→"))), route.map((stage, index) => h("li", null,
    h("span", { class: "swatch", style: hue(stage.node) }),
    h("span", { class: "cut" }, nameOf(stage)),
    h("span", { class: "muted" }, layerText(stage.layers)),
    times && stage.compute_ms_per_token > 0 && h("span", { class: "muted" }, ms(stage.compute_ms_per_token + stage.overhead_ms_per_token)),
    times && isRing && h("span", { class: "hop" }, `${index === route.length - 1 ? "↩" : "→"} ${ms(stage.network_ms_per_token)}`),
    !(times && isRing) && index < route.length - 1 && h("span", { class: "hop" }, "→"))));
}
