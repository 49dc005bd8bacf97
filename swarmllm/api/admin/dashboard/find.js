// One field that finds models on the hub, and says of each whether it fits in this swarm.

import { h } from "./dom.js";
import { bytes, plural, rate } from "./format.js";
import { call } from "./link.js";

let search = { term: "", found: null, isRunning: false, trouble: "" };
const troubles = new Map(); // of a source that could not be started

/** `place` tells the ids of two such fields on one page apart. */
export function findModel(place, again) {
  const { term, found, isRunning, trouble } = search;
  const submit = (event) => {
    event.preventDefault();
    look(new FormData(event.target).get("term").trim(), again);
  };
  return h("div", { class: "body find", "data-key": "find" },
    h("form", { class: "row", onsubmit: submit },
      h("label", { class: "sr", for: `find-${place}` }, "Find a model"),
      h("input", { id: `find-${place}`, name: "term", type: "search", class: "grow", required: true, maxlength: "200", autocomplete: "off", spellcheck: "false", placeholder: "Find a model: qwen, llama 8b …" }),
      h("button", { type: "submit", disabled: isRunning }, "Find")),
    h("div", { class: "small muted", role: "status" }, isRunning ? `Looking for “${term}”…` : found && !found.length ? `The hub has no model with GGUF files for “${term}”.` : ""),
    trouble && h("p", { class: "small bad", role: "alert" }, trouble),
    found?.length > 0 && h("ul", { class: "found", "aria-label": "Models found" }, found.map((model) => result(model, again))));
}

function result(model, again) {
  const file = model.source.slice(model.source.lastIndexOf(":") + 1);
  const [text, isGood] = fits(model);
  const isShared = model.n_nodes > 1;
  const label = isShared ? "Fetch and share" : "Fetch";
  const start = async () => {
    troubles.delete(model.source);
    try {
      await call("POST", "api/admin/downloads", { source: model.source, share: isShared });
      location.hash = "#models";
    } catch (error) { troubles.set(model.source, error.message); }
    again();
  };
  return h("li", { "data-key": model.source },
    h("div", { class: "grow" },
      h("div", { class: "cut" }, h("strong", null, model.repo)),
      h("div", { class: "small muted" }, [file, model.download_bytes !== null && bytes(model.download_bytes)].filter(Boolean).join(" · ")),
      h("div", { class: isGood ? "small good" : "small muted" }, text),
      troubles.has(model.source) && h("p", { class: "small bad", role: "alert" }, troubles.get(model.source))),
    model.download_bytes !== null && model.fits !== false && h("button", { type: "button", "aria-label": `${label} ${model.repo}`, onclick: start }, label));
}

/** Whether the swarm could hold it, in words, and whether that is good news. */
function fits({ fits, problem, n_nodes: nodes, tokens_per_s: speed }) {
  if (fits === null) return [`not known whether it fits: ${problem}`, false];
  if (!fits) return [`does not fit in this swarm: ${problem}`, false];
  return [`fits in this swarm: yes, ${nodes > 1 ? `over ${plural(nodes, "node")}` : "on one node"}${speed === null ? "" : `, about ${rate(speed)} tokens/s`}`, true];
}

async function look(term, again) {
  if (!term || search.isRunning) return;
  search = { term, found: null, isRunning: true, trouble: "" };
  again();
  try {
    const { models } = await (await call("POST", "api/admin/models/search", { term })).json();
    search = { term, found: models, isRunning: false, trouble: "" };
  } catch (error) { search = { term, found: null, isRunning: false, trouble: error.message }; }
  again();
}
