// What this node knows of models, and what can be done with them: fetch, load, unload, with progress.

import { h, show } from "./dom.js";
import { findModel } from "./find.js";
import { planOf, shareButton, shareState } from "./shares.js";
import { bytes, layersIn, layerText, plural, rate, seconds } from "./format.js";
import { call, pieces } from "./link.js";

const messages = new Map();
let pullMessage = null;

export function renderModels(root, state) {
  if (!state.models) {
    show(root, h("div", { class: "panel empty" }, "Connecting to the node…"));
    return;
  }
  const again = () => renderModels(root, state);
  const work = state.work ? state.work.running : [];
  const shares = state.shares ? state.shares.shares : [];
  show(root,
    state.downloads && pullPanel(state.downloads.downloads, again),
    h("section", { class: "panel", "data-key": "find", "aria-label": "Find a model" },
      h("div", { class: "head" }, h("h2", null, "Find a model")),
      findModel("models", again)),
    h("section", { class: "panel", "data-key": "models", "aria-label": "Models of the swarm" },
      h("div", { class: "head row between" }, h("h2", null, "Models"), h("span", { class: "muted small" }, plural(state.models.models.length, "model") + (state.models.left_out ? `, and ${state.models.left_out} more that only others have` : ""))),
      state.models.models.length
        ? state.models.models.map((model) => row(model, work, shares, again))
        : h("p", { class: "empty" }, "No models yet. Fetch one above, or run ", h("code", null, "swarmllm models add PATH.gguf"), ".")));
}

function pullPanel(downloads, again) {
  return h("section", { class: "panel", "data-key": "pull", "aria-label": "Fetch a model" },
    h("div", { class: "head" }, h("h2", null, "Fetch a model")),
    h("form", { class: "body row", onsubmit: (event) => pull(event, again) },
      h("label", { class: "sr", for: "source" }, "Source"),
      h("input", { id: "source", name: "source", class: "grow", required: true, autocomplete: "off", spellcheck: "false", placeholder: "hf:org/repo:file.gguf, or an https address" }),
      h("label", { class: "sr", for: "pull-layers" }, "Layers"),
      h("input", { id: "pull-layers", name: "layers", class: "layers", autocomplete: "off", placeholder: "all layers", pattern: "[0-9]+:[0-9]+", title: "START:END, for example 0:12" }),
      h("button", { type: "submit", class: "primary" }, "Fetch")),
    pullMessage && h("p", { class: "body bad", role: "alert", style: { "padding-top": "0" } }, pullMessage),
    downloads.map((each) => download(each, again)));
}

function waitingRow(model) {
  const { waiting } = model;
  return h("div", { class: "model", "data-key": `waiting ${model.name}` },
    h("div", { class: "grow" },
      h("div", { class: "row" }, h("strong", { class: "cut" }, model.name), h("span", { class: "tag" }, `fetched: layers ${waiting.layers.map(layerText).join(", ")}`)),
      h("div", { class: "muted small" }, [waiting.architecture, plural(model.n_layers, "layer"), bytes(waiting.size_bytes)].filter(Boolean).join(" · ")),
      h("div", { class: "small muted" }, `waiting for ${layersIn(waiting.waits_for)}`),
      waiting.contradictions.map((each) => h("div", { class: "small bad" }, `${each.nodes.join(" and ")} contradict each other`))));
}

function row(model, work, shares, again) {
  if (model.waiting) return waitingRow(model);
  const key = model.model_id;
  const running = work.find((each) => each.model === model.name);
  const facts = [model.architecture, plural(model.n_layers, "layer"), model.size_bytes && bytes(model.size_bytes), model.path ? (model.stored ? "fetched" : "file of this machine") : "only other nodes have it"];
  const missing = model.missing.map(layerText).join(", ");
  const state = model.complete ? h("span", { class: "good" }, `ready: complete on ${plural(model.n_holders, "node")}`)
    : model.holders.length ? h("span", { class: "bad" }, missing ? `layers ${missing} missing in the swarm` : "its layers do not join up") : "not loaded anywhere";
  const message = messageOf(model);
  const share = shares.find((each) => each.model_id === key);
  const say = (text) => { text ? messages.set(key, text) : messages.delete(key); again(); };
  return h("div", { class: "model", "data-key": key },
    h("div", { class: "grow" },
      h("div", { class: "row" }, h("strong", { class: "cut" }, model.name), model.loaded.length > 0 && h("span", { class: "tag" }, `here: layers ${model.loaded.map(layerText).join(", ")}`), model.pinned && h("span", { class: "tag" }, "pinned"), share && h("span", { class: "tag" }, share.own ? "shared" : "held for others")),
      h("div", { class: "muted small" }, facts.filter(Boolean).join(" · ")),
      h("div", { class: "small muted" }, state),
      model.trouble && h("div", { class: "small bad" }, `runs on, but cannot be loaded again: ${model.trouble}`),
      model.projector_trouble && h("div", { class: "small bad" }, `takes no pictures here: ${model.projector_trouble.cause}; ${model.projector_trouble.remedy}`)),
    h("form", { class: "row", onsubmit: (event) => load(event, model, again) },
      h("label", { class: "sr", for: `layers-${key}` }, `Layers of ${model.name}`),
      h("input", { id: `layers-${key}`, class: "layers", name: "layers", autocomplete: "off", placeholder: "all layers", pattern: "[0-9]+:[0-9]+", title: `START:END, at most 0:${model.n_layers}` }),
      h("button", { type: "submit", disabled: Boolean(running), "aria-label": `Load ${model.name}` }, "Load"),
      h("button", { type: "button", disabled: !model.loaded.length || Boolean(running), "aria-label": `Unload ${model.name}`, onclick: () => unload(model, again) }, "Unload"),
      shareButton(model, share, say)),
    planOf(model, say),
    share && shareState(share),
    running && h("div", { class: "work" }, progress(`${running.phase || running.kind} ${model.name}`, running.done_bytes, running.total_bytes)),
    message && h("p", { class: "work bad", role: "alert" }, message));
}

/** What went wrong the last time that something was done with a model. */
export const messageOf = (model) => messages.get(model.model_id);

export function progress(label, done, total, note = "", shown = label) {
  return h("div", { class: "progress" },
    h("progress", { "aria-label": label, ...(total ? { max: total, value: done } : {}) }),
    h("div", { class: "row between small muted" }, h("span", { class: "cut" }, shown), h("span", null, total ? `${bytes(done)} of ${bytes(total)}` : "", note)));
}

const ENDED = { done: "fetched", cancelled: "cancelled", failed: "failed" };

function download(each, again) {
  const isRunning = !(each.state in ENDED);
  const ask = (method, what) => () => act(() => call(method, `api/admin/downloads/${each.id}${what}`, what && {}), (text) => { pullMessage = text; again(); });
  const left = each.bytes_per_s > 0 && each.total_bytes ? ` · ${rate(each.bytes_per_s / 1e6)} MB/s · ${seconds((each.total_bytes - each.done_bytes) / each.bytes_per_s)} left` : "";
  return h("div", { class: "body", "data-key": each.id, style: { "border-top": "1px solid var(--line)" } },
    h("div", { class: "row between" },
      h("span", { class: "cut grow" }, each.source, each.layers && ` · layers ${layerText(each.layers)}`),
      h("span", { class: each.state === "failed" ? "bad small" : "muted small" }, each.waits_for ? `fetched, waiting for ${layersIn(each.waits_for)}` : ENDED[each.state] || each.state),
      isRunning && h("button", { type: "button", class: "quiet", "data-key": "cancel", "aria-label": `Cancel ${each.source}`, onclick: ask("DELETE", "") }, "Cancel"),
      ["failed", "cancelled"].includes(each.state) && h("button", { type: "button", class: "quiet", "data-key": "retry", "aria-label": `Try again: ${each.source}`, onclick: ask("POST", "/retry") }, "Try again"),
      !isRunning && h("button", { type: "button", class: "quiet", "data-key": "clear", title: each.state === "done" ? "The model stays" : "What has arrived is deleted", "aria-label": `Clear ${each.source}`, onclick: ask("POST", "/clear") }, "Clear")),
    isRunning && progress(each.source, each.done_bytes, each.total_bytes, left, ""),
    each.trouble && h("p", { class: "bad small" }, `${each.trouble}; trying again`),
    each.error && h("p", { class: "bad small" }, each.error));
}

async function act(action, say) {
  say(null);
  try { await action(); } catch (error) { say(error.message); }
}

function pull(event, again) {
  event.preventDefault();
  const form = event.target;
  const fields = new FormData(form);
  act(async () => {
    await call("POST", "api/admin/downloads", { source: fields.get("source").trim(), layers: fields.get("layers").trim() || null });
    form.reset();
  }, (text) => { pullMessage = text; again(); });
}

function load(event, model, again) {
  event.preventDefault();
  loadLayers(model, new FormData(event.target).get("layers").trim() || null, again);
}

/** `layers` null: all of them. */
export function loadLayers(model, layers, again) {
  act(async () => {
    const answer = await call("POST", `api/admin/models/${model.model_id}/load`, { layers });
    for await (const line of pieces(answer, "\n")) {
      const each = JSON.parse(line);
      if (each.type === "error") throw new Error(each.error.message);
    }
  }, (text) => { text ? messages.set(model.model_id, text) : messages.delete(model.model_id); again(); });
}

function unload(model, again) {
  act(() => call("POST", `api/admin/models/${model.model_id}/unload`, {}), (text) => { text ? messages.set(model.model_id, text) : messages.delete(model.model_id); again(); });
}
