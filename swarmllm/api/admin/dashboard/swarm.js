// The swarm as a picture: nodes, who holds which layers of which model, and the requests walking through them.

import { h, show } from "./dom.js";
import { bytes, clock, hue, layerText, ms, plural, range, rate, seconds, shortId } from "./format.js";
import { hops, timeBar } from "./routes.js";
import { nextMachine, startPanel } from "./start.js";

const ROW = 26;
const HISTORY = 120;
const history = [];

export function remember(node) {
  history.push(node.tokens_per_s ?? 0);
  if (history.length > HISTORY) history.shift();
}

export function renderSwarm(root, state) {
  if (!state.node || !state.models || !state.peers || !state.requests) {
    show(root, h("div", { class: "panel empty" }, state.link.status === "lost" ? "The node does not answer." : "Connecting to the node…"));
    return;
  }
  const nodes = [self(state.node), ...state.peers.peers];
  const recently = state.peers.left.filter((node) => node.recently);
  const before = state.peers.left.filter((node) => !node.recently);
  const held = state.models.models.filter((model) => model.holders.length);
  const again = () => renderSwarm(root, state);
  const { live, recent: ended } = state.requests;
  if (!held.length && !live.length && !ended.length && nodes.length === 1 && !state.peers.left.length) {
    show(root, stats(state, nodes), startPanel(state, again));
    return;
  }
  show(root,
    stats(state, nodes),
    panel("Layers", held.length ? `${plural(held.length, "model")} held` : "", held.length
      ? held.map((model) => map(model, nodes, state.requests.live))
      : h("p", { class: "empty" }, "No node holds any layers yet. Load a model under ", h("a", { href: "#models" }, "Models"), ", or run ", h("code", null, "swarmllm models load guide"), ".")),
    panel("Nodes", plural(nodes.length, "node"), h("div", { class: "nodes", tabindex: "0", role: "region", "aria-label": "Nodes of the swarm" }, nodes.map(nodeCard), recently.map(leftCard)), before.length > 0 && gone(before),
      nodes.length === 1 && h("details", { class: "gone", "data-key": "join" }, h("summary", null, "Add a machine"), nextMachine(again))),
    panel("Live pipelines", [foreign(state.node), state.requests.live.some((request) => request.route.length) && "per token: solid computes, pale queues, hatched travels"].filter(Boolean).join(" · "), state.requests.live.length
      ? state.requests.live.map(pipeline)
      : h("p", { class: "empty" }, "No request of this node runs. Ask something under ", h("a", { href: "#chat" }, "Chat"), ".")),
    state.node.serving.length > 0 && panel("Computed for other nodes", "of the last ten minutes", serving(state.node.serving)),
    panel("Recent requests", "", state.requests.recent.length
      ? recent(state.requests.recent)
      : h("p", { class: "empty" }, "No request has ended since the node started.")));
}

const self = (node) => ({
  node_id: node.node_id, nickname: node.nickname, isSelf: true, rtt_ms: null, data_plane: "",
  memory_total_bytes: node.memory_total_bytes, memory_free_bytes: node.memory_available_bytes, gpus: node.gpus,
  reach: reach(node), active_requests: node.requests.active, max_requests: node.requests.max, resident: node.resident_bytes + node.workers.reduce((sum, worker) => sum + worker.resident_bytes, 0),
});

function reach({ reachability, addresses, port_mapping: ports }) {
  if (!reachability) return null;
  const isDialled = reachability.control.some((each) => each.reached);
  const relayed = addresses.some((address) => address.includes("/p2p-circuit")) ? "reached through a relay" : "others cannot dial it";
  return { said: isDialled ? "others can dial it" : relayed, title: ports.state === "failed" ? `ports are not forwarded: ${ports.detail}` : ports.detail };
}

const foreign = (node) => (node.pipelines.active_stage_requests ? `${plural(node.pipelines.active_stage_requests, "request")} of other nodes ${node.pipelines.active_stage_requests === 1 ? "runs" : "run"} here` : "");

function panel(title, note, ...body) {
  return h("section", { class: "panel", "data-key": title, "aria-label": title },
    h("div", { class: "head row between" }, h("h2", null, title), h("span", { class: "muted small" }, note)), body);
}

function stats(state, nodes) {
  const { node } = state;
  const resident = nodes[0].resident;
  const used = node.memory_total_bytes - node.memory_available_bytes;
  const share = (part) => `${node.memory_total_bytes ? (100 * part) / node.memory_total_bytes : 0}%`;
  return h("div", { class: "stats", "data-key": "stats" },
    h("div", { class: "stat" }, h("div", { class: "muted small" }, "Generating"),
      h("div", { class: "value" }, rate(node.tokens_per_s ?? 0), h("small", null, " tokens/s")),
      h("div", { class: "muted small" }, `${node.generated_tokens.toLocaleString("en")} since start`), spark()),
    h("div", { class: "stat" }, h("div", { class: "muted small" }, "Requests"),
      h("div", { class: "value" }, node.requests.active, h("small", null, ` of ${node.requests.max} running`)),
      h("div", { class: "muted small" }, node.requests.queued ? `${node.requests.queued} waiting` : "none waiting", node.requests.failed ? h("span", { class: "bad" }, ` · ${node.requests.failed} failed`) : "")),
    h("div", { class: "stat" }, h("div", { class: "muted small" }, "Nodes"),
      h("div", { class: "value" }, nodes.length, h("small", null, nodes.length === 1 ? " alone so far" : ` with this one`)),
      h("div", { class: "muted small" }, `up ${seconds(Date.now() / 1000 - node.started_at)} · v${node.version}`)),
    h("div", { class: "stat" }, h("div", { class: "muted small" }, "Memory"),
      h("div", { class: "value" }, bytes(resident), h("small", null, ` of ${bytes(node.memory_total_bytes)}`)),
      h("div", { class: "meter", role: "img", "aria-label": `SwarmLLM ${bytes(resident)}, other programs ${bytes(Math.max(0, used - resident))}`, title: "SwarmLLM, then other programs", style: { "margin-top": "9px" } },
        h("i", { style: { width: share(resident) } }), h("i", { style: { width: share(Math.max(0, used - resident)) } }))));
}

function spark() {
  if (!history.some((value) => value > 0)) return null;
  const top = Math.max(...history);
  const points = history.map((value, index) => `${index + HISTORY - history.length},${(30 - (28 * value) / top).toFixed(1)}`);
  return h("svg", { class: "spark", viewBox: `0 0 ${HISTORY} 31`, preserveAspectRatio: "none", "aria-hidden": "true" },
    h("path", { class: "area", d: `M${HISTORY - history.length},31 L${points.join(" L")} L${HISTORY},31 Z` }), h("path", { d: `M${points.join(" L")}` }));
}

const gpuText = (gpus = []) => gpus.length > 0 && ` · ${gpus.length === 1 ? "GPU" : `${gpus.length} GPUs`}: ${bytes(gpus.reduce((sum, gpu) => sum + gpu.free_bytes, 0))} free of ${bytes(gpus.reduce((sum, gpu) => sum + gpu.total_bytes, 0))}`;

function nodeCard(node) {
  const used = node.memory_total_bytes - node.memory_free_bytes;
  const distance = node.isSelf ? "" : [node.rtt_ms === null ? null : `${node.rtt_ms.toFixed(1)} ms away`, node.data_plane === "none" ? "no data connection" : node.data_plane].filter(Boolean).join(" · ");
  return h("div", { class: "node", "data-key": node.node_id },
    h("div", { class: "name" }, h("span", { class: "swatch", style: hue(node.node_id) }), h("span", { class: "cut" }, node.nickname || shortId(node.node_id)), node.isSelf && h("span", { class: "tag" }, "this node")),
    h("div", { class: "muted small cut", title: node.node_id }, h("span", { class: "mono" }, shortId(node.node_id)), distance && ` · ${distance}`),
    node.reach && h("div", { class: "muted small", title: node.reach.title }, node.reach.said),
    node.memory_total_bytes > 0 && h("div", { class: "meter", role: "img", "aria-label": `Memory: ${bytes(used)} of ${bytes(node.memory_total_bytes)} used` }, h("i", { style: { width: `${(100 * used) / node.memory_total_bytes}%` } })),
    node.memory_total_bytes > 0 && h("div", { class: "muted small" }, `${bytes(node.memory_free_bytes)} free of ${bytes(node.memory_total_bytes)}`, gpuText(node.gpus), node.active_requests > 0 && ` · ${node.active_requests} running`));
}

const leftSince = (node) => `left ${seconds(Date.now() / 1000 - node.left_at)} ago`;
const heldBefore = (node) => node.models.map((model) => `${model.name} layers ${model.layers.map(layerText).join(", ")}`).join(" · ");

function leftCard(node) {
  const held = heldBefore(node);
  return h("div", { class: "node left", "data-key": node.node_id },
    h("div", { class: "name" }, h("span", { class: "swatch", style: hue(node.node_id) }), h("span", { class: "cut" }, node.nickname || shortId(node.node_id)), h("span", { class: "tag" }, "left")),
    h("div", { class: "muted small cut", title: node.node_id }, h("span", { class: "mono" }, shortId(node.node_id)), ` · ${leftSince(node)}`),
    held && h("div", { class: "muted small cut", title: held }, `held ${held}`));
}

function gone(nodes) {
  return h("details", { class: "gone", "data-key": "gone" },
    h("summary", null, `${plural(nodes.length, "node")} left in the last hour`),
    h("ul", null, nodes.map((node) => h("li", { "data-key": node.node_id }, h("span", { class: "swatch", style: hue(node.node_id) }),
      h("span", { class: "cut" }, node.nickname || shortId(node.node_id)), h("span", { class: "muted small" }, leftSince(node))))));
}

function map(model, nodes, live) {
  const order = new Map(nodes.map((node, index) => [node.node_id, index]));
  const first = (holder) => Math.min(...holder.layers.map((text) => range(text)[0]));
  const holders = [...model.holders].sort((a, b) => first(a) - first(b) || order.get(a.node_id) - order.get(b.node_id));
  const rows = new Map(holders.map((holder, index) => [holder.node_id, index]));
  const place = (text) => { const [start, end] = range(text); return { left: `${(100 * start) / model.n_layers}%`, width: `${(100 * (end - start)) / model.n_layers}%` }; };
  const missing = model.missing.map(layerText).join(", ");
  const seeing = seeingNodes(model, nodes);
  const others = nodes.filter((node) => seeing.has(node.node_id) && !rows.has(node.node_id));
  const projector = (nodeId, name) => seeing.size > 0 && projectorCell(nodeId, name, seeing.get(nodeId));
  return h("div", { class: "map", "data-key": model.model_id },
    h("div", { class: "row between" },
      h("div", null, h("strong", null, model.name), h("span", { class: "muted small" }, `  ${model.architecture ? `${model.architecture} · ` : ""}${model.n_layers} layers${model.size_bytes ? ` · ${bytes(model.size_bytes)}` : ""}`)),
      model.complete ? h("span", { class: "good small" }, `complete on ${plural(model.n_holders, "node")}`)
        : h("span", { class: "bad small" }, missing ? `${model.missing.length === 1 && !missing.includes("–") ? "layer" : "layers"} ${missing} missing` : "layers do not join up")),
    h("div", { class: seeing.size ? "strips sees" : "strips", style: { "--layers": model.n_layers } },
      axis(model.n_layers, seeing.size > 0),
      flows(model, live, rows),
      holders.map((holder) => h("div", { class: "strip", "data-key": holder.node_id },
        h("div", { class: "label" }, h("span", { class: "swatch", style: hue(holder.node_id) }), h("span", { class: "cut" }, holder.nickname || shortId(holder.node_id))),
        h("div", { class: "track", role: "img", "aria-label": `${holder.nickname || holder.node_id} holds layers ${holder.layers.map(layerText).join(", ")}` },
          holder.layers.map((text) => h("div", { class: "bar", title: `layers ${layerText(text)}`, style: { ...place(text), ...hue(holder.node_id) } }))),
        projector(holder.node_id, holder.nickname || holder.node_id))),
      others.map((node) => h("div", { class: "strip", "data-key": node.node_id },
        h("div", { class: "label" }, h("span", { class: "swatch", style: hue(node.node_id) }), h("span", { class: "cut" }, node.nickname || shortId(node.node_id))),
        h("div", { class: "track", role: "img", "aria-label": `${node.nickname || node.node_id} holds no layers` }),
        projector(node.node_id, node.nickname || node.node_id))),
      model.n_holders > holders.length && h("div", { class: "muted small" }, `and ${plural(model.n_holders - holders.length, "more node")}`),
      h("div", { class: "strip", style: { height: model.missing.length ? "30px" : "18px" } },
        h("div", { class: "label muted small" }, "coverage"),
        h("div", { class: "track sum", role: "img", "aria-label": missing ? `Layers ${missing} are missing` : "Every layer is held" },
          covered(model).map((text) => h("div", { class: "bar", style: place(text) })),
          model.missing.map((text) => h("div", { class: "bar gap", title: `layers ${layerText(text)} are missing`, style: place(text) })),
          model.missing.map((text) => { const [start, end] = range(text); const isLast = start + end > 1.8 * model.n_layers; return h("span", { class: isLast ? "gap-note last" : "gap-note", style: { left: isLast ? "100%" : `${(50 * (start + end)) / model.n_layers}%` } }, `${layerText(text)} missing`); })))));
}

/** Who has the projector of a model: node id -> in which state, where that is known. */
function seeingNodes(model, nodes) {
  const own = model.projector && model.projector.state !== "unloaded";
  return new Map([...(own ? [[nodes[0].node_id, model.projector.state.replace("_", " ")]] : []), ...(model.encoders ?? []).map((nodeId) => [nodeId, ""])]);
}

function projectorCell(nodeId, name, state) {
  if (state === undefined) return h("div", { class: "mmproj", role: "img", "aria-label": `${name} has no projector` });
  return h("div", { class: "mmproj has", role: "img", style: hue(nodeId), "aria-label": `${name} has the projector`, title: `projector (mmproj): encodes pictures${state && `, ${state}`}` });
}

function covered(model) {
  const parts = [];
  let start = 0;
  for (const [from, to] of [...model.missing.map(range), [model.n_layers, model.n_layers]]) {
    if (from > start) parts.push(`${start}:${from}`);
    start = to;
  }
  return parts;
}

function axis(n, sees) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 40].find((each) => n / each <= 10) || 64;
  const marks = Array.from({ length: Math.floor(n / step) + 1 }, (_, index) => index * step).filter((mark) => n - mark >= step / 2);
  return h("div", { class: "axis", "aria-hidden": "true" }, [...marks, n].map((mark) => h("span", { style: { left: `${(100 * mark) / n}%` } }, mark)), sees && h("b", null, "mmproj"));
}

/** Each different route that runs now, as a line from strip to strip and back to the first. */
function flows(model, live, rows) {
  const running = live.filter((request) => request.model === model.name && request.route.length && request.route.every((stage) => rows.has(stage.node)));
  const lines = new Set(running.map((request) => {
    const path = request.route.flatMap((stage) => { const y = rows.get(stage.node) * ROW + ROW / 2; const [start, end] = range(stage.layers); return [`${start},${y}`, `${end},${y}`]; });
    return `M${path.join(" L")}`;
  }));
  if (!lines.size) return null;
  const height = rows.size * ROW;
  return h("svg", { class: "flow", "data-key": "flow", viewBox: `0 0 ${model.n_layers} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true", style: { height: `${height}px`, "z-index": 1 } },
    [...lines].map((line) => h("path", { d: line })));
}

const WORDS = { queued: "waits for a turn", prefill: "reads the prompt", decode: "generates" };

function pipeline(request) {
  return h("div", { class: "pipeline", "data-key": request.id },
    h("div", { class: "row between" },
      h("div", null, h("strong", null, request.model), h("span", { class: "muted" }, `  ${WORDS[request.state] || request.state}`)),
      h("div", { class: "muted small" }, [request.generated_tokens ? plural(request.generated_tokens, "token") : "", request.tokens_per_s ? `${rate(request.tokens_per_s)} tokens/s` : "", ms(request.elapsed_ms)].filter(Boolean).join(" · "))),
    request.route.length > 0 && timeBar(request.route),
    request.route.length > 0 && hops(request.route));
}

// On a narrow screen a row becomes lines of words (see the style sheet); the roles keep it a table.
const cell = (what, ...body) => h("td", { role: "cell", ...what }, ...body);
const number = (label, value) => cell({ class: value === "–" ? "num none" : "num", "data-label": label }, value);

function listing(name, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, h("table", { role: "table" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((head) => (Array.isArray(head) ? h("th", { class: "num", scope: "col", role: "columnheader" }, head[0]) : h("th", { scope: "col", role: "columnheader" }, head))))),
    h("tbody", { role: "rowgroup" }, rows)));
}

function serving(stages) {
  return listing("Table of stages computed for other nodes", ["For", "Model", "Layers", ["Running", 1], ["Tokens", 1], ["Tokens/s", 1]],
    stages.map((stage) => h("tr", { role: "row", "data-key": `${stage.model_id} ${stage.node_id}` },
      cell({ title: stage.node_id }, h("span", { class: "swatch inline", style: hue(stage.node_id) }), stage.nickname || shortId(stage.node_id)),
      cell({}, stage.name || shortId(stage.model_id)),
      cell({ class: "muted" }, `layers ${stage.layers.map(layerText).join(", ")}`),
      number("running", stage.active || "–"),
      number("tokens", stage.tokens.toLocaleString("en")),
      number("tokens/s", stage.active ? rate(stage.tokens_per_s) : "–"))));
}

function recent(requests) {
  return listing("Table of recent requests", ["Time", "Model", "Outcome", ["Prompt", 1], ["Answer", 1], ["First token", 1], ["Tokens/s", 1], "Route"],
    requests.slice(0, 20).map((request) => h("tr", { role: "row", "data-key": request.id },
      cell({ class: "muted" }, clock(request.started_at)),
      cell({}, request.model),
      cell({ class: `outcome ${request.state === "failed" ? "bad" : "muted"}`, title: request.error }, request.state === "failed" && request.error ? request.error : request.state),
      number("prompt", request.prompt_tokens || "–"),
      number("answer", request.generated_tokens || "–"),
      number("first token", ms(request.first_token_ms)),
      number("tokens/s", rate(request.tokens_per_s)),
      cell({ class: request.route.length ? "route" : "route none" }, request.route.length ? hops(request.route, { times: false }) : "–"))));
}
