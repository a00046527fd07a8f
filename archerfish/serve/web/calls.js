// Examples of each route, for the models of this server.

import {get} from "./api.js";
import {copyButton, el} from "./dom.js";
import {recall, remember} from "./store.js";

const LANGUAGES = [["curl", "curl"], ["python", "Python"]];

export async function mount(section, app) {
  const {calls} = await get("/web/data.json");
  const kinds = new Set(app.models.map((model) => model.kind));
  const shown = calls.filter((call) => !call.kinds.length || call.kinds.some((kind) => kinds.has(kind)));
  const list = el("div");

  const fill = (language) => {
    remember("language", language);
    list.replaceChildren(...shown.map((call) => example(call, language, app)));
  };
  const language = recall("language", "curl");
  const choice = el("fieldset", {class: "switch"}, el("legend", {class: "unseen"}, "Language"), LANGUAGES.map(([name, label]) => el("label", null,
    el("input", {type: "radio", name: "language", checked: name === language, onchange: () => fill(name)}), el("span", null, label))));
  section.append(el("div", {class: "page"},
    el("h1", null, "Calls"),
    el("p", {class: "note"}, "An example of each route, for this server. All routes and their parameters: ",
      el("a", {href: "/docs"}, "/docs"), ". For programs: ", el("a", {href: "/openapi.json"}, "/openapi.json"), "."),
    choice, list));
  fill(language);
}

function example(call, language, app) {
  const model = call.kinds.map((kind) => app.model(kind)).find(Boolean);
  const text = call[language].replaceAll("$ADDRESS", location.origin).replaceAll("$MODEL", model?.id ?? "");
  return el("article", {class: "call"},
    el("h2", null, el("span", {class: "method"}, call.method), call.path),
    el("div", {class: "code"}, el("pre", {tabindex: "0", "aria-label": `${call.method} ${call.path}`}, el("code", null, text)),
      copyButton(() => text, `Copy ${call.method} ${call.path}`)));
}
