// The panel beside a chat: the system prompt, and the parameters of /v1/chat/completions as the server states them.

import {get} from "./api.js";
import {el, errorBox, iconButton} from "./dom.js";
import {Playground} from "./playground.js";
import {remember} from "./store.js";

// What the page sets itself.
const OWN = new Set([
  "model", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "response_format", "tools", "tool_choice",
  "continue_final_message", "add_generation_prompt", "max_completion_tokens",
]);
// Parameters in groups; those that are not named here come last.
const GROUPS = {
  Sampling: ["temperature", "top_p", "top_k", "min_p", "seed"],
  Length: ["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "truncate_prompt_tokens"],
  Repetition: ["repetition_penalty", "presence_penalty", "frequency_penalty"],
  Words: ["bad_words", "allowed_token_ids", "logit_bias"],
  Grammar: ["guided_regex", "guided_choice", "guided_grammar", "guided_json", "structured_outputs"],
  Reasoning: ["reasoning_effort", "include_reasoning"],
  Scheduling: ["priority", "deadline_s", "speculate"],
};

/** The type of a parameter: number, integer, boolean, string, strings (one in each line) or json. */
export function typeOf(schema) {
  const kinds = (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
  const list = kinds.find((one) => one.type === "array");
  if (list) return list.items?.type === "string" ? "strings" : "json";
  return kinds.length === 1 && kinds[0].type && kinds[0].type !== "object" ? kinds[0].type : "json";
}

/** The value of what was typed; undefined: nothing. Throws what is wrong with it. */
export function readValue(type, text) {
  if (text.trim() === "") return undefined;
  if (type === "string") return text;
  if (type === "strings") return text.split("\n").filter((line) => line !== "");
  if (type === "boolean") return text === "true";
  if (type === "json") return JSON.parse(text);
  const value = Number(text);
  if (Number.isNaN(value)) throw new Error("Not a number.");
  if (type === "integer" && !Number.isInteger(value)) throw new Error("Not a whole number.");
  return value;
}

function textOf(type, value) {
  if (value === undefined) return "";
  const shown = (one) => (type !== "json" && typeof one === "string" ? one : JSON.stringify(one));
  return type === "strings" ? [value].flat().map(shown).join("\n") : shown(value);
}

export class Panel {
  constructor(chat) {
    this.chat = chat;
    this.system = el("textarea", {rows: "4", id: "system", placeholder: "How the model should behave", oninput: () => this.change("system", this.system.value)});
    this.parameters = el("div");
    this.playground = new Playground(chat);
    this.settings = el("div", {class: "stack"}, el("label", {for: "system"}, "System prompt"), this.system, this.parameters);
    const pages = [["Settings", this.settings], ["Playground", this.playground.element]];
    const choice = pages.map(([name, page], at) => el("label", null,
      el("input", {type: "radio", name: "panel", checked: at === 0, onchange: () => pages.forEach(([, one]) => { one.hidden = one !== page; })}),
      el("span", null, name)));
    this.playground.element.hidden = true;
    this.element = el("aside", {class: "panel", "aria-label": "Settings and playground", hidden: true},
      el("div", {class: "row"},
        el("fieldset", {class: "switch"}, el("legend", {class: "unseen"}, "Page of the panel"), choice),
        iconButton("close", "Close the panel", () => chat.togglePanel(false))),
      this.settings, this.playground.element);
  }

  change(name, value) {
    this.chat.conversation.settings[name] = value;
    this.chat.save();
  }

  /** Shows the settings of the open conversation. */
  async update() {
    const {settings} = this.chat.conversation;
    this.system.value = settings.system ?? "";
    this.playground.update();
    if (this.element.hidden) return;
    try {
      this.schemas ??= (await get("/web/data.json")).parameters;
    } catch (error) {
      this.parameters.replaceChildren(errorBox(error, () => this.update()));
      return;
    }
    const grouped = new Set(Object.values(GROUPS).flat());
    const others = Object.keys(this.schemas).filter((name) => !OWN.has(name) && !grouped.has(name));
    const groups = Object.entries({...GROUPS, Others: others}).map(([title, names]) => this.group(title, names.filter((name) => name in this.schemas)));
    const reset = el("button", {type: "button", onclick: () => { this.change("params", {}); remember("params", {}); this.update(); }}, "Unset all");
    this.parameters.replaceChildren(el("p", {class: "note"}, "What is empty is not sent: the model's or the server's own value holds."), ...groups, reset);
  }

  group(title, names) {
    const {params = {}} = this.chat.conversation.settings;
    const numSet = names.filter((name) => params[name] !== undefined).length;
    return el("details", {open: title === "Sampling" || numSet > 0}, el("summary", null, title),
      names.map((name) => this.field(name, this.schemas[name], params[name])));
  }

  field(name, schema, value) {
    const type = typeOf(schema), id = `p-${name}`, {description} = schema;
    const own = this.chat.app.models.find((model) => model.id === this.chat.conversation.settings.model)?.default_sampling?.[name];
    const onchange = (event) => this.set(name, type, event.target);
    const text = textOf(type, value);
    let input;
    if (type === "boolean") {
      input = el("select", {id, onchange}, [["", "unset"], ["true", "on"], ["false", "off"]].map(([key, label]) => el("option", {value: key, selected: key === text}, label)));
    } else if (type === "number" || type === "integer") {
      const {minimum, maximum, exclusiveMinimum} = {...schema, ...schema.anyOf?.[0]};
      const range = [minimum ?? exclusiveMinimum, maximum].map((bound) => (Math.abs(bound) < 1e6 ? bound : undefined));
      input = el("input", {id, type: "number", step: type === "integer" ? "1" : "any", min: range[0], max: range[1], value: text, onchange, placeholder: own ?? "unset"});
    } else {
      const hint = {json: "JSON", strings: "one in each line"}[type];
      input = el(type === "string" ? "input" : "textarea", {id, rows: type === "string" ? null : "2", value: text, onchange, placeholder: hint ?? "unset", spellcheck: "false"});
    }
    if (description) input.setAttribute("aria-description", description);
    return el("div", {class: `field ${type}`, title: description}, el("label", {for: id}, name), input, el("span", {class: "problem"}));
  }

  set(name, type, input) {
    const problem = input.parentElement.querySelector(".problem");
    problem.textContent = "";
    input.removeAttribute("aria-invalid");
    const params = {...this.chat.conversation.settings.params};
    try {
      params[name] = readValue(type, input.value);
    } catch (error) {
      problem.textContent = error.message;
      input.setAttribute("aria-invalid", "true");
      return;
    }
    if (params[name] === undefined) delete params[name];
    this.change("params", params);
    remember("params", params);
  }
}
