// What a node that is new can do: load the bundled model, find another one, let a second machine join.

import { copy } from "./conversations.js";
import { h } from "./dom.js";
import { findModel } from "./find.js";
import { bytes } from "./format.js";
import { call } from "./link.js";
import { loadLayers, messageOf, progress } from "./models.js";

const GUIDE = "guide";
let join = null; // what the node says about joining; null until it was asked
let invited = null; // { command } once somebody asked for it
let trouble = "";
let isCopied = false;

/** Instead of the panels that would all be empty. */
export function startPanel(state, again) {
  const guide = state.models.models.find((model) => model.name === GUIDE && model.path);
  const others = state.models.models.length - (guide ? 1 : 0);
  return h("section", { class: "panel start", "data-key": "start", "aria-label": "Start" },
    h("div", { class: "head" }, h("h2", null, "Start")),
    guide && loadGuide(guide, state.work?.running.find((each) => each.model === GUIDE), again),
    h("h3", { "data-key": "find-title" }, "Find a model"),
    findModel("start", again),
    others > 0 && h("p", { class: "body small muted", "data-key": "others" }, "Other models that this node knows are under ", h("a", { href: "#models" }, "Models"), "."),
    h("h3", { "data-key": "join-title" }, "Add a machine"),
    h("div", { class: "body", "data-key": "join" }, nextMachine(again)));
}

function loadGuide(guide, running, again) {
  const message = messageOf(guide);
  return h("div", { class: "body", "data-key": "guide" },
    h("div", { class: "row" },
      h("button", { type: "button", class: "primary", disabled: Boolean(running), onclick: () => loadLayers(guide, null, again) }, "Load guide"),
      h("span", { class: "muted grow" }, `The bundled model answers questions about SwarmLLM. It has ${bytes(guide.size_bytes)} and is here already.`)),
    running && progress(`${running.phase || running.kind} ${GUIDE}`, running.done_bytes, running.total_bytes),
    message && h("p", { class: "small bad", role: "alert" }, message));
}

/** The line to paste on the next machine. It is asked for when it is first shown. */
export function nextMachine(again) {
  if (join === null) { join = {}; ask(again); }
  const command = invited?.command || join.command;
  return h("div", { class: "join", "data-key": "next" },
    command && h("div", { class: "row", "data-key": "command" },
      h("code", { class: "line grow" }, command),
      h("button", { type: "button", onclick: async () => { isCopied = await copy(command); again(); } }, isCopied ? "Copied" : "Copy")),
    h("p", { class: "small muted", "data-key": "hint" }, hint(command)),
    join.private && h("div", { class: "row", "data-key": "invite" },
      invited ? h("button", { type: "button", "data-key": "hide", onclick: () => { invited = null; isCopied = false; again(); } }, "Hide")
        : h("button", { type: "button", "data-key": "show", onclick: () => invite(again) }, "Show invitation")),
    trouble && h("p", { class: "small bad", role: "alert", "data-key": "trouble" }, trouble));
}

function hint(command) {
  if (join.private === undefined) return "";
  if (!join.reachable) return "Other machines cannot reach this node: see network.listen_host and network.announce.";
  if (invited) return "Run this on the next machine, then swarmllm daemon. It contains the key of this private swarm: hand it over as you would a password.";
  if (join.private) return "This swarm is private: the next machine needs an invitation, which contains its key.";
  return command ? "Run this on the next machine. This swarm is open: anyone who reaches this node's ports may join." : "";
}

async function ask(again) {
  try {
    join = await (await call("GET", "api/admin/join")).json();
    trouble = "";
  } catch (error) { trouble = error.message; }
  again();
}

async function invite(again) {
  trouble = "";
  try { invited = await (await call("POST", "api/admin/invitations", {})).json(); } catch (error) { trouble = error.message; }
  again();
}
