// Sharing a model out over the swarm: the plan is shown and asked about, then how far it is.

import { h } from "./dom.js";
import { bytes, layerText, plural, rate, seconds } from "./format.js";
import { call } from "./link.js";

const plans = new Map();

export function shareButton(model, share, say) {
  if (share?.own) {
    return h("button", { type: "button", "aria-label": `Stop sharing ${model.name}`, onclick: () => attempt(say, () => call("DELETE", `api/admin/shares/${model.model_id || encodeURIComponent(model.name)}`)) }, "Stop sharing");
  }
  return h("button", { type: "button", disabled: plans.has(model.model_id), "aria-label": `Share ${model.name}`, onclick: () => attempt(say, () => ask(model, say)) }, "Share…");
}

/** What sharing would come to, while the person who asked has not decided yet. */
export function planOf(model, say) {
  const plan = plans.get(model.model_id);
  if (!plan) return null;
  const close = () => { plans.delete(model.model_id); say(null); };
  const takes = (part) => part.layers.length ? `layers ${part.layers.map(layerText).join(", ")}, ${bytes(part.size_bytes)}` : "no layers";
  const expected = [plan.tokens_per_s && `${rate(plan.tokens_per_s)} tokens/s expected`, plan.transfer_s > 0 && `transfer about ${seconds(plan.transfer_s)}`].filter(Boolean).join(" · ");
  return h("div", { class: "work", role: "group", "aria-label": `Plan for ${model.name}` },
    plan.parts.map((part) => h("div", { class: "small", "data-key": part.node_id }, h("strong", null, part.nickname || part.node_id.slice(-8)), ` ${takes(part)}`)),
    plan.refusing.length > 0 && h("div", { class: "small muted" }, `${plural(plan.refusing.length, "connected node")} do not accept what this one shares`),
    h("div", { class: "small muted" }, expected),
    plan.problem && h("p", { class: "small bad" }, plan.problem),
    h("div", { class: "row" },
      !plan.problem && h("button", { type: "button", class: "primary", "aria-label": `Share it out: ${model.name}`, onclick: () => attempt(say, async () => { await call("POST", "api/admin/shares", { model: model.model_id }); plans.delete(model.model_id); }) }, "Share it out"),
      h("button", { type: "button", class: "quiet", "aria-label": `Cancel sharing ${model.name}`, onclick: close }, "Cancel")));
}

export function shareState(share) {
  const loading = share.members.filter((each) => each.loading.length).map((each) => `${each.nickname || each.node_id.slice(-8)} fetches ${each.loading.map(layerText).join(", ")}`);
  const label = share.complete ? `shared: all layers are held by ${plural(share.members.filter((each) => each.layers.length).length, "node")}` : `shared: ${share.n_ready} of ${plural(share.n_layers, "layer")} held`;
  return h("div", { class: "work" },
    h("progress", { "aria-label": `Layers of ${share.model} that are held`, max: share.n_layers || 1, value: share.n_ready }),
    h("div", { class: "small muted" }, [label, ...loading].join(" · ")));
}

async function ask(model, say) {
  plans.set(model.model_id, await (await call("GET", `api/admin/shares/${model.model_id}/plan`)).json());
  say(null);
}

async function attempt(say, action) {
  say(null);
  try { await action(); say(null); } catch (error) { say(error.message); }
}
