// Embeddings and reranking: texts compared in a heat map, many lines in a map of two dimensions, documents sorted for a query.

import {post} from "./api.js";
import {batches, color, cosine, count, linesOf, pca, percent, scaled} from "./charts.js";
import {el, errorBox, icon, say} from "./dom.js";

const MAX_COMPARED = 24, MAX_LINES = 5000, MAX_LABELS = 40, BATCH = 64;
const COMPARED = [
  "The archerfish hunts insects above the water.", "A fish that shoots down flies.", "Some fish spit at their prey.",
  "Sourdough rises slowly in a cold kitchen.", "Bread needs flour, water, salt and time.", "The train to the coast leaves at nine.",
];
const MAPPED = [
  "A trout swims against the stream.", "Sharks have lived in the sea for a very long time.", "The archerfish spits water at insects.",
  "Whales sing to each other over great distances.", "An octopus opens a jar.", "Coral reefs shelter thousands of species.",
  "Knead the dough until it is smooth.", "Roast the tomatoes with garlic and oil.", "Simmer the soup for twenty minutes.",
  "A pinch of salt makes chocolate sweeter.", "Whisk the eggs before you add the sugar.", "The bread is done when it sounds hollow.",
  "The striker scored in the last minute.", "She won the marathon in the rain.", "The match ended without a goal.",
  "He trains for the swimming championship.", "The coach changed the whole defence.", "Fans filled the stadium early.",
  "The compiler reports a missing bracket.", "Restart the server after the update.", "This function returns a list of strings.",
  "The tests pass on the new branch.", "Memory leaks are hard to find.", "The database answers in a few milliseconds.",
  "The violin plays the main theme.", "An old piano stands in the hall.", "The band released its second album.", "The choir sings on Sunday evening.",
];
const QUERY = "How does an archerfish catch its food?";
const DOCUMENTS = [
  "Bread rises because yeast makes gas in the dough.", "Archerfish shoot down insects with jets of water, and eat what falls.",
  "The fish lives in mangroves from India to Australia.", "Trains in the mountains use a third rail with teeth.",
  "Its aim allows for the bending of light at the surface of the water.", "A good net catches fish of one size.",
];

let app;

export async function mount(section, given) {
  app = given;
  await new Promise((done) => document.head.append(el("link", {rel: "stylesheet", href: "/web/texts.css", onload: done, onerror: done})));
  const page = el("div", {class: "page texts"}, el("h1", null, "Texts"));
  section.append(page);
  const panels = [];
  if (app.model("embedding")) panels.push(["Compare", comparePanel()], ["Map", mapPanel()]);
  if (app.model("embedding") || app.model("cross-encoder")) panels.push(["Rerank", rerankPanel()]);
  if (!panels.length) {
    page.append(el("p", {class: "note"}, "No embedding model and no cross-encoder is served here."));
    return;
  }
  const choose = (chosen) => { for (const [name, panel] of panels) panel.hidden = name !== chosen; };
  page.append(
    el("div", {class: "switch", role: "radiogroup", "aria-label": "What to do with texts"}, panels.map(([name], place) =>
      el("label", null, el("input", {type: "radio", name: "texts", checked: !place, onchange: () => choose(name)}), el("span", null, name)))),
    ...panels.map(([, panel]) => panel));
  choose(panels[0][0]);
}

function modelSelect(...kinds) {
  const models = app.models.filter((one) => kinds.includes(one.kind));
  models.sort((a, b) => kinds.indexOf(a.kind) - kinds.indexOf(b.kind));
  return el("select", {"aria-label": "Model"}, models.map((one) => el("option", {value: one.id}, one.id)));
}

/** A form that runs one job at a time; its button stops the one that runs. */
function jobForm(label, fields, extras, result, run) {
  let running = null;
  const problem = el("div"), progress = el("progress", {max: "1", value: 0, hidden: true, "aria-label": "Progress"});
  const button = el("button", {class: "primary"}, icon("play"), label);
  const form = el("form", {class: "stack", onsubmit: async (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    running = new AbortController();
    button.replaceChildren(icon("stop"), "Stop");
    problem.replaceChildren();
    try {
      await run(running.signal, (share) => { progress.hidden = share >= 1; progress.value = share; });
      say("Done");
    } catch (error) {
      if (error.name !== "AbortError") problem.append(errorBox(error, () => form.requestSubmit()));
    }
    running = null;
    progress.hidden = true;
    button.replaceChildren(icon("play"), label);
  }}, ...fields, el("div", {class: "row"}, button, ...extras, progress));
  return el("div", {class: "job stack"}, form, problem, result);
}

async function embed(model, lines, signal, onProgress = () => {}) {
  const vectors = [];
  for (const part of batches(lines, BATCH)) {
    onProgress(vectors.length / lines.length);
    const found = await post("/v1/embeddings", {model, input: part}, {signal});
    vectors.push(...found.data.sort((a, b) => a.index - b.index).map((one) => one.embedding));
  }
  onProgress(1);
  return vectors;
}

// Compare

/** Similarities of all pairs, and the range of those of different texts. */
export function similarities(vectors) {
  const rows = vectors.map((one) => vectors.map((other) => cosine(one, other)));
  const others = rows.flatMap((row, i) => row.filter((_, j) => i !== j));
  return {rows, low: Math.min(...others), high: Math.max(...others)};
}

function comparePanel() {
  const model = modelSelect("embedding"), result = el("div", {class: "result"});
  const field = el("textarea", {rows: "7", "aria-label": "Texts, one a line", value: COMPARED.join("\n")});
  return jobForm("Compare", [el("p", {class: "note"}, `One text a line, up to ${MAX_COMPARED}. Each number is the cosine of two texts' vectors: 1 is the same direction.`), field], [model], result, async (signal) => {
    const lines = linesOf(field.value, MAX_COMPARED);
    if (lines.length < 2) throw new Error("Give at least two lines to compare.");
    const {rows, low, high} = similarities(await embed(model.value, lines, signal));
    const cell = (value, i, j) => {
      const made = el("td", {class: i === j ? "same" : "", title: `${lines[i]}\n${lines[j]}`}, value.toFixed(2));
      made.style.setProperty("--share", i === j ? 0 : scaled(value, low, high).toFixed(3));
      made.dataset.value = value;
      return made;
    };
    result.replaceChildren(
      el("div", {class: "wide", tabindex: "0", role: "region", "aria-label": "Similarities"}, el("table", {class: "heat"},
        el("thead", null, el("tr", null, el("td"), lines.map((_, j) => el("th", {scope: "col"}, String(j + 1))))),
        el("tbody", null, rows.map((row, i) => el("tr", null,
          el("th", {scope: "row"}, el("span", {class: "text", title: lines[i]}, `${i + 1}  ${lines[i]}`)), row.map((value, j) => cell(value, i, j))))))),
      el("div", {class: "scale note"}, el("span", null, low.toFixed(2)), el("span", {class: "ramp"}), el("span", null, high.toFixed(2))));
  });
}

// Map

function mapPanel() {
  const model = modelSelect("embedding"), field = el("textarea", {rows: "7", "aria-label": "Lines to map", value: MAPPED.join("\n")});
  const canvas = el("canvas", {tabindex: "0", role: "img", class: "points"}), shown = el("p", {class: "line", "aria-live": "polite"}), note = el("p", {class: "note"});
  const result = el("div", {class: "result", hidden: true}, canvas, shown, note);
  const file = el("input", {type: "file", accept: ".txt,.csv,.tsv,.md,text/*", class: "unseen", tabindex: "-1", "aria-hidden": "true", onchange: async () => {
    if (file.files[0]) field.value = linesOf(await file.files[0].text(), MAX_LINES).join("\n");
    file.value = "";
  }});
  const upload = el("button", {type: "button", onclick: () => file.click()}, icon("upload"), "Text file");
  let lines = [], places = [], chosen = -1;

  const draw = () => {
    const width = canvas.clientWidth, height = Math.round(Math.min(520, Math.max(300, width * 0.6))), ratio = window.devicePixelRatio || 1;
    if (!width || !places.length) return;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d"), isLabelled = lines.length <= MAX_LABELS && width > 560, radius = lines.length > 1000 ? 2.5 : 4.5;
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const [from, to, text] = ["accent", "warn", "muted"].map(color);
    places.forEach((place) => { [place.left, place.top] = [14 + place.x * (width - 28 - (isLabelled ? 175 : 0)), 14 + place.y * (height - 28)]; });
    for (const [number, place] of places.entries()) {
      const strength = chosen < 0 || chosen === number ? 0.9 : 0.45;
      for (const [alpha, fill] of [[strength, from], [strength * place.z, to]]) {
        pen.globalAlpha = alpha;
        pen.fillStyle = fill;
        pen.beginPath();
        pen.arc(place.left, place.top, radius, 0, 7);
        pen.fill();
      }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = text;
    const taken = [];
    for (const [number, place] of isLabelled ? places.entries() : []) {
      const box = [place.left + 8, place.top - 7];
      if (taken.some(([x, y]) => Math.abs(x - box[0]) < 165 && Math.abs(y - box[1]) < 13)) continue;
      if (places.some((other) => other.left > box[0] && other.left < box[0] + 165 && Math.abs(other.top - place.top) < 9)) continue;
      taken.push(box);
      pen.fillText(lines[number].length > 26 ? `${lines[number].slice(0, 25)}\u2026` : lines[number], box[0], place.top + 4);
    }
    if (chosen >= 0) {
      pen.strokeStyle = color("fg");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(places[chosen].left, places[chosen].top, radius + 3, 0, 7);
      pen.stroke();
    }
  };
  const choose = (number) => {
    if (number === chosen) return;
    chosen = number;
    shown.textContent = number >= 0 ? lines[number] : "Point at a dot to read its line, or step through them with the arrow keys.";
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const distances = places.map((place) => Math.hypot(place.left - event.offsetX, place.top - event.offsetY)), least = distances.reduce((a, b) => Math.min(a, b), Infinity);
    choose(least < 24 ? distances.indexOf(least) : -1);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step || !places.length) return;
    event.preventDefault();
    choose((chosen + step + places.length) % places.length);
  });
  new ResizeObserver(draw).observe(result);
  addEventListener("themechange", draw);

  const fields = [el("p", {class: "note"}, `One text a line, up to ${count(MAX_LINES)}. Lines of a similar meaning lie close together.`), field];
  return jobForm("Draw the map", fields, [upload, file, model], result, async (signal, onProgress) => {
    const wanted = linesOf(field.value, MAX_LINES);
    if (wanted.length < 3) throw new Error("Give at least three lines for a map.");
    const {points, shares} = pca(await embed(model.value, wanted, signal, onProgress), 3);
    const [xs, ys, zs] = [0, 1, 2].map((axis) => points.map((point) => point[axis]));
    const spread = (values) => { const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b)); return (value) => scaled(value, low, high); };
    const [x, y, z] = [xs, ys, zs].map(spread);
    lines = wanted;
    places = points.map((point) => ({x: x(point[0]), y: y(point[1]), z: z(point[2])}));
    chosen = -2;
    result.hidden = false;
    canvas.setAttribute("aria-label", `A map of ${lines.length} lines`);
    note.textContent = `${count(lines.length)} lines along their two main directions, which show ${percent(shares[0] + shares[1])} of their differences; the colour is the third.`;
    choose(-1);
  });
}

// Rerank

function rerankPanel() {
  const model = modelSelect("cross-encoder", "embedding"), query = el("input", {type: "text", "aria-label": "Query", value: QUERY});
  const field = el("textarea", {rows: "7", "aria-label": "Documents, one a line", value: DOCUMENTS.join("\n")}), result = el("ol", {class: "ranks"});
  const note = el("p", {class: "note"}, "Documents, one a line, sorted by how well they answer the query: by a cross-encoder where one is served, else by the cosine of vectors.");
  return jobForm("Rerank", [note, query, field], [model], result, async (signal) => {
    const documents = linesOf(field.value);
    if (!query.value.trim() || !documents.length) throw new Error("Give a query and at least one document.");
    const {results} = await post("/v1/rerank", {model: model.value, query: query.value, documents}, {signal});
    const scores = results.map((one) => one.relevance_score), low = Math.min(0, ...scores), high = Math.max(...scores);
    result.replaceChildren(...results.map((one) => {
      const bar = el("span", {class: "bar"});
      bar.style.width = `${(100 * scaled(one.relevance_score, low, high)).toFixed(1)}%`;
      return el("li", null, el("span", {class: "row"}, el("span", {class: "text"}, documents[one.index]), el("b", {class: "score"}, one.relevance_score.toFixed(3))), el("span", {class: "track"}, bar));
    }));
  });
}
