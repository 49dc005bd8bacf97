// The page: one state, fed by one event stream, drawn by one view at a time.

import { h, show } from "./dom.js";
import { renderChat } from "./chat.js";
import { follow, store } from "./link.js";
import { renderModels } from "./models.js";
import { remember, renderSwarm } from "./swarm.js";

const state = { link: { status: "connecting", detail: "" }, node: null, peers: null, models: null, requests: null, work: null, downloads: null, shares: null };
const views = { swarm: renderSwarm, models: renderModels, chat: renderChat };
const $ = (id) => document.getElementById(id);
let scheduled = false;

const current = () => (location.hash.slice(1) in views ? location.hash.slice(1) : "swarm");

function draw() {
  scheduled = false;
  const name = current();
  for (const each of Object.keys(views)) $(`view-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const { status, detail } = state.link;
  const isLive = status === "live";
  document.title = state.node ? `${state.node.nickname} · SwarmLLM` : "SwarmLLM";
  show($("who"), h("span", { class: `dot ${isLive ? "on" : status === "lost" ? "off" : ""}` }), h("span", { class: "cut" }, state.node?.nickname || ""),
    h("span", { class: "sr" }, isLive ? "connected" : "not connected"));
  show($("notice"), status === "lost" ? `The connection to the node is lost; trying again. ${detail}`
    : status === "limited" ? "This key may use models, but not look at this node: only the chat works."
    : state.node && !state.node.ready ? `This node has not loaded all that it was told to: ${state.node.reason}.` : "");
  $("main").classList.toggle("stale", status === "lost" && state.node !== null);
  if (status === "limited" && name !== "chat") show($(`view-${name}`), h("div", { class: "panel empty" }, "This needs a key that may administer the node."));
  else views[name]($(`view-${name}`), state);
}

function redraw() {
  if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
}

function askForKey(message) {
  const dialog = $("login");
  $("login-error").textContent = store.key ? message : "";
  store.key = null;
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    $("login-form").onsubmit = () => { store.key = $("login-key").value.trim(); $("login-form").reset(); resolve(); };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

function setUpTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const choice = localStorage.getItem("swarmllm-theme") || "auto";
    document.documentElement.dataset.theme = choice === "auto" ? (dark.matches ? "dark" : "light") : choice;
    $("theme").textContent = `Theme: ${choice}`;
  };
  dark.addEventListener("change", apply);
  $("theme").onclick = () => {
    const next = { auto: "dark", dark: "light", light: "auto" };
    localStorage.setItem("swarmllm-theme", next[localStorage.getItem("swarmllm-theme") || "auto"]);
    apply();
  };
  apply();
}

setUpTheme();
addEventListener("hashchange", () => { draw(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); });
draw();
follow(
  (name, data) => { state[name] = data; if (name === "node") remember(data); redraw(); },
  (status, detail = "") => { state.link = { status, detail }; redraw(); return status === "locked" ? askForKey(detail) : undefined; },
);
