// One pipeline as a person sees it: where each part of the time went.

import { h } from "./dom.js";
import { hue, layerText, ms, shortId } from "./format.js";

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

/** The stages in order, with their layers and times. */
export function hops(route, { times = true } = {}) {
  const isRing = route.some((stage) => stage.network_ms_per_token > 0);
  return h("ol", { class: "hops", "aria-label": "Route" }, route.map((stage, index) => h("li", null,
    h("span", { class: "swatch", style: hue(stage.node) }),
    h("span", { class: "cut" }, nameOf(stage)),
    h("span", { class: "muted" }, layerText(stage.layers)),
    times && stage.compute_ms_per_token > 0 && h("span", { class: "muted" }, ms(stage.compute_ms_per_token + stage.overhead_ms_per_token)),
    times && isRing && h("span", { class: "hop" }, `${index === route.length - 1 ? "↩" : "→"} ${ms(stage.network_ms_per_token)}`),
    !(times && isRing) && index < route.length - 1 && h("span", { class: "hop" }, "→"))));
}
