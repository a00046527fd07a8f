// The live view of a model's engine: figures, memory, cached prefixes and the last requests, asked for once a second.

import {get} from "./api.js";
import {ago, cellSize, cellsOf, count, duration, linePath, percent, svg} from "./charts.js";
import {el} from "./dom.js";

const POLL_MS = 1000, RETRY_MS = 3000, KEPT = 60, MAX_CELLS = 2048;
const KINDS = {
  running: ["Running", "Blocks that running sequences hold or need"],
  cached: ["Cached", "Blocks that only the prefix cache holds; they give way when room is needed"],
  others: ["Others", "Blocks of other tenants"],
  hidden: ["Free or others", "Blocks that are free, or those of other tenants"],
  free: ["Free", "Blocks that nobody holds"],
};
const REASONS = {
  full: ["hit", "good"], limit: ["hit", "good"], between_states: ["part", "warn"], never_seen: ["new", "plain"],
  evicted: ["evicted", "bad"], adapter_differs: ["adapter", "warn"], cache_off: ["off", "plain"],
};
const FIGURES = [ // title, what the line shows, large text, small text
  ["Tokens / s", (view) => view.tokens_per_second, (view) => view.tokens_per_second.toFixed(1), () => "mean of 3 s"],
  ["Running", (view) => view.num_running, (view) => count(view.num_running), (view) => `${count(view.num_waiting)} waiting`],
  ["First token", (view) => view.ttft_p50_s, (view) => duration(view.ttft_p50_s), (view) => `p99 ${duration(view.ttft_p99_s)}`],
  ["Between tokens", (view) => view.inter_token_p50_s, (view) => duration(view.inter_token_p50_s), (view) => `p99 ${duration(view.inter_token_p99_s)}`],
  ["KV in use", (view) => view.kv_usage, (view) => percent(view.kv_usage), (view) => `of ${count(view.blocks.total)} blocks`],
  ["Prefix hit rate", hitRate, (view) => percent(hitRate(view)), (view) => `${count(view.cached_tokens)} tokens`],
  ["Drafts accepted", (view) => view.acceptance, (view) => percent(view.acceptance), () => "of proposed tokens"],
];

let app, model = "", replica = "", timer = null, isShown = false, isAsking = false, number = 0;
let parts = null, views = [], shownNodes = "", selected = null;
const histories = new Map(); // of a model and a replica: the last figures

export function hitRate(view) {
  const total = view.cached_tokens + view.computed_tokens;
  return total ? view.cached_tokens / total : null;
}

/** Nodes in the order of an indented list, each with its depth and a key that stays the same while the node is there. */
export function rowsOf(nodes) {
  const below = new Map(), rows = [];
  nodes.forEach((node, place) => below.set(node.parent, [...below.get(node.parent) ?? [], place]));
  const add = (parent, depth, path) => {
    for (const place of below.get(parent) ?? []) {
      const node = nodes[place], key = `${path}/${node.adapter}:${node.start}:${node.text.slice(0, 24)}`;
      rows.push({node, depth, key, numShown: (below.get(place) ?? []).length});
      add(place, depth + 1, key);
    }
  };
  add(-1, 0, "");
  return rows;
}

export async function mount(section, given) {
  app = given;
  await new Promise((done) => document.head.append(el("link", {rel: "stylesheet", href: "/web/engine.css", onload: done, onerror: done})));
  const models = app.models.filter((one) => ["generation", "tts"].includes(one.kind));
  const page = el("div", {class: "page engine"});
  section.append(page);
  if (!models.length) {
    page.append(el("h1", null, "Engine"), el("p", {class: "note"}, "No model that generates is served here, so there is no cache to look into."));
    return;
  }
  model = (app.model("generation") ?? models[0]).id;
  parts = {
    state: el("span", {class: "badge"}, "connecting"), problem: el("p", {class: "error problem-line", role: "alert", hidden: true}),
    models: el("select", {"aria-label": "Model", onchange: (event) => { model = event.target.value; restart(); }},
      models.map((one) => el("option", {value: one.id, selected: one.id === model}, one.id))),
    replicas: el("select", {"aria-label": "Replica", hidden: true, onchange: (event) => { replica = event.target.value; redraw(); }}),
    figures: FIGURES.map(([title]) => figureCard(title)), body: el("div", {class: "engine-body", hidden: true}),
    map: el("canvas", {role: "img", class: "map", "aria-label": "Blocks of memory"}), legend: el("ul", {class: "legend"}), mapNote: el("p", {class: "note"}),
    tree: el("ul", {class: "tree"}), treeNote: el("p", {class: "note"}), node: el("div", {class: "node", "aria-live": "polite"}),
    requests: el("tbody"), requestsNote: el("p", {class: "note"}),
    table: el("div", {class: "wide", tabindex: "0", role: "region", "aria-label": "Last requests"}),
  };
  const heads = ["Ended", "Cache", "Prompt", "From cache", "Output", "Queue", "Prefill", "Decode", "Finish"];
  parts.table.append(el("table", null, el("thead", null, el("tr", null, heads.map((head, i) => el("th", {scope: "col", class: i > 1 && i < 8 ? "number" : ""}, head)))), parts.requests));
  parts.body.append(
    el("div", {class: "figures"}, parts.figures.map((one) => one.card)),
    el("section", {class: "card"}, el("h2", null, "Memory"), parts.map, parts.legend, parts.mapNote),
    el("section", {class: "card"}, el("h2", null, "Cached prefixes"), parts.treeNote, el("div", {class: "tree-box"}, parts.tree, parts.node)),
    el("section", {class: "card"}, el("h2", null, "Last requests"), parts.requestsNote, parts.table));
  page.append(
    el("div", {class: "row head"}, el("h1", null, "Engine"), parts.state, el("span", {class: "space"}), parts.models, parts.replicas),
    parts.problem, parts.body);
  new ResizeObserver(() => drawMap()).observe(parts.map.parentElement);
  addEventListener("themechange", drawMap);
  document.addEventListener("visibilitychange", () => plan(0));
}

export function show() {
  isShown = true;
  plan(0);
}

export function hide() {
  isShown = false;
  clearTimeout(timer);
}

function restart() {
  number += 1; // what was asked for before is not wanted any more
  isAsking = false;
  views = [];
  replica = "";
  selected = null;
  plan(0);
}

function plan(delay) {
  clearTimeout(timer);
  if (parts && isShown && !document.hidden) timer = setTimeout(poll, delay);
}

async function poll() {
  if (isAsking) return;
  isAsking = true;
  const mine = number, began = performance.now();
  let delay = POLL_MS;
  try {
    const found = await get(`/v1/cache/view?model=${encodeURIComponent(model)}`);
    if (mine !== number) return;
    views = found.replicas;
    for (const view of views) remember(view);
    setState(true);
    redraw();
  } catch (error) {
    if (mine !== number) return;
    delay = RETRY_MS;
    setState(false, error);
  }
  isAsking = false;
  plan(Math.max(0, delay - (performance.now() - began)));
}

function setState(isLive, error) {
  parts.state.textContent = isLive ? "live" : "away";
  parts.state.className = `badge ${isLive ? "good" : "bad"}`;
  const text = isLive ? "" : `${error.message} ${error.hint ?? ""} This view goes on by itself when it answers.`;
  if (parts.problem.textContent !== text) parts.problem.textContent = text;
  parts.problem.hidden = isLive;
  parts.body.classList.toggle("stale", !isLive);
}

function remember(view) {
  const key = `${model}\n${view.replica}`, kept = histories.get(key) ?? FIGURES.map(() => []);
  FIGURES.forEach(([, value], place) => { kept[place] = [...kept[place], value(view)].slice(-KEPT); });
  histories.set(key, kept);
}

// Drawing

function figureCard(title) {
  const large = el("strong"), small = el("span", {class: "note"});
  const line = svg("path", {class: "line"}), drawing = svg("svg", {viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true"}, line);
  return {card: el("div", {class: "card figure"}, el("span", {class: "note"}, title), large, small, drawing), large, small, line};
}

function redraw() {
  const names = views.map((view) => view.replica);
  if (!names.includes(replica)) replica = names[0] ?? "";
  const view = views.find((one) => one.replica === replica);
  parts.body.hidden = !view;
  if (!view) return;
  parts.replicas.hidden = names.length < 2;
  if ([...parts.replicas.options].map((one) => one.value).join("\n") !== names.join("\n")) {
    parts.replicas.replaceChildren(...names.map((name) => el("option", {value: name}, name)));
  }
  parts.replicas.value = replica;
  const kept = histories.get(`${model}\n${replica}`);
  FIGURES.forEach(([, , large, small], place) => {
    const card = parts.figures[place];
    card.large.textContent = large(view);
    card.small.textContent = small(view);
    card.line.setAttribute("d", linePath(kept[place], 100, 28, KEPT));
  });
  parts.figures[FIGURES.length - 1].card.hidden = view.acceptance === null;
  drawMap();
  drawTree(view);
  drawRequests(view.requests);
}

function drawMap() {
  const view = views.find((one) => one.replica === replica), canvas = parts?.map;
  if (!view || !canvas.clientWidth) return;
  const {runs, total, order, block_tokens: tokens} = view.blocks, size = cellSize(total, MAX_CELLS), cells = cellsOf(runs, size);
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  const pitch = Math.max(6, Math.min(16, Math.floor(Math.sqrt((width * 150) / cells.length)))), columns = Math.floor(width / pitch);
  const height = Math.ceil(cells.length / columns) * pitch;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), gap = pitch > 8 ? 2 : 1;
  pen.scale(ratio, ratio);
  const colors = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, getComputedStyle(canvas).getPropertyValue(`--${kind}`).trim()]));
  cells.forEach((cell, place) => {
    const left = (place % columns) * pitch, top = Math.floor(place / columns) * pitch;
    let below = pitch - gap;
    const sum = Object.values(cell).reduce((a, b) => a + b, 0);
    for (const kind of Object.keys(KINDS)) { // a cell of several kinds is divided
      if (!cell[kind]) continue;
      const part = ((pitch - gap) * cell[kind]) / sum;
      pen.fillStyle = colors[kind];
      pen.fillRect(left, top + below - part, pitch - gap, part);
      below -= part;
    }
  });
  const counts = {};
  for (const [kind, number] of runs) counts[kind] = (counts[kind] ?? 0) + number;
  parts.legend.replaceChildren(...Object.keys(KINDS).filter((kind) => counts[kind]).map((kind) =>
    el("li", {title: KINDS[kind][1]}, el("span", {class: `swatch ${kind}`}), `${KINDS[kind][0]} `, el("b", null, count(counts[kind])))));
  canvas.setAttribute("aria-label", Object.entries(counts).map(([kind, number]) => `${KINDS[kind][0]}: ${number} blocks`).join(", "));
  parts.mapNote.textContent = `${count(total)} blocks of ${count(tokens)} tokens each, ${order === "memory" ? "in the order of memory" : "sorted by kind"}`
    + (size > 1 ? `; a square stands for ${size}.` : ".");
}

function drawTree(view) {
  const rows = rowsOf(view.nodes), longest = Math.max(1, ...view.nodes.map((node) => node.end - node.start));
  parts.treeNote.textContent = rows.length
    ? `${count(view.num_nodes)} parts of prompts and answers${rows.length < view.num_nodes ? `, the ${rows.length} most recent ones below` : ""}. What is indented continues what is above it. Choose one to read it.`
    : "Nothing is cached yet. Send a prompt: its tokens stay here, and the next prompt that begins the same is answered sooner.";
  const shape = JSON.stringify(rows.map((row) => [row.key, row.node.end, row.node.hits, row.node.locks]));
  if (shape !== shownNodes) {
    shownNodes = shape;
    const focused = document.activeElement?.dataset?.key;
    parts.tree.replaceChildren(...rows.map((row) => treeRow(row, longest)));
    if (focused !== undefined) [...parts.tree.querySelectorAll("button")].find((one) => one.dataset.key === focused)?.focus();
  }
  const found = rows.find((row) => row.key === selected);
  parts.node.hidden = !found;
  if (found) showNode(found);
}

function treeRow({node, depth, key}, longest) {
  const tokens = node.end - node.start, bar = el("span", {class: `bar ${node.locks ? "running" : node.hits ? "hit" : ""}`});
  bar.style.width = `${Math.max(2, Math.round((36 * tokens) / longest))}px`;
  const told = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  const facts = [told(tokens, "token"), node.hits ? told(node.hits, "hit") : "", node.locks ? "in use" : ""];
  const button = el("button", {
    type: "button", "data-key": key, "aria-pressed": String(key === selected),
    onclick: () => { selected = selected === key ? null : key; shownNodes = ""; redraw(); },
  }, el("span", {class: "lane"}, bar), el("span", {class: "words"}, node.text.trim() || "\u2026"), el("span", {class: "note facts"}, facts.filter(Boolean).join(" \u00b7 ")));
  button.style.paddingLeft = `${0.4 + 0.8 * Math.min(depth, 8)}rem`;
  return el("li", null, button);
}

function showNode({node, numShown}) {
  const facts = [
    ["Tokens", `${count(node.start)} to ${count(node.end)} of their prompts`], ["Hits", count(node.hits)],
    ["Last used", ago(node.age_s)], ["Running sequences that need it", count(node.locks)],
    ["Continued by", `${count(node.num_children)} others${numShown < node.num_children ? `, of which ${numShown} are shown` : ""}`],
  ];
  if (node.adapter) facts.push(["Adapter", node.adapter]);
  parts.node.replaceChildren(
    el("pre", {tabindex: "0", "aria-label": "Text"}, node.text || "This model has no tokenizer."),
    el("dl", {class: "keys"}, facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))));
}

function drawRequests(requests) {
  parts.table.hidden = !requests.length;
  parts.requestsNote.textContent = requests.length ? "Your requests that have ended, the newest first, with what the cache had of each prompt and why not more."
    : "No request of yours has ended yet.";
  parts.requests.replaceChildren(...requests.flatMap((one) => {
    const [word, kind] = REASONS[one.reason] ?? ["\u2013", "plain"], isPart = kind === "plain" && one.cached_tokens > 0;
    const ms = (value) => el("td", {class: "number"}, duration(value / 1000)), amount = (value) => el("td", {class: "number"}, count(value));
    return [
      el("tr", null, el("td", null, ago(one.ended_s_ago)),
        el("td", null, el("span", {class: `badge ${isPart ? "good" : kind}`, title: one.reason}, isPart ? "part" : word)), amount(one.prompt_tokens),
        amount(one.cached_tokens), amount(one.output_tokens), ms(one.queue_ms), ms(one.prefill_ms), ms(one.decode_ms), el("td", null, one.finish_reason)),
      el("tr", {class: "why"}, el("td", {colspan: "9"}, one.why || "It ended before it was looked up.")),
    ];
  }));
}
