// Answers in a form, and tools: what is written here goes into the requests of the open conversation.

import {el} from "./dom.js";

const PERSON = {
  type: "object", required: ["name", "age", "hobbies"], additionalProperties: false,
  properties: {name: {type: "string"}, age: {type: "integer", minimum: 0, maximum: 120}, hobbies: {type: "array", items: {type: "string"}, maxItems: 4}},
};
const SCHEMAS = {
  "A person": PERSON,
  "A sentiment": {
    type: "object", required: ["sentiment", "confidence"], additionalProperties: false,
    properties: {sentiment: {enum: ["positive", "neutral", "negative"]}, confidence: {type: "number", minimum: 0, maximum: 1}},
  },
  "A list of steps": {
    type: "object", required: ["steps"], additionalProperties: false,
    properties: {steps: {type: "array", minItems: 1, maxItems: 6, items: {type: "string"}}},
  },
};
const tool = (name, description, properties) => (
  {type: "function", function: {name, description, parameters: {type: "object", properties, required: Object.keys(properties)}}});
const TOOLS = {
  "The weather": [tool("get_weather", "The weather in a city.", {city: {type: "string"}})],
  "A calculator": [tool("calculate", "The value of an arithmetic expression.", {expression: {type: "string"}})],
  "A search and a clock": [tool("search", "Search the web.", {query: {type: "string"}}), tool("get_time", "The time in a city.", {city: {type: "string"}})],
};
const pretty = (value) => JSON.stringify(value, null, 2);

/** What is wrong with a text of JSON, or nothing. isWanted: whether the value has the right kind. */
function problemOf(text, isWanted, expected) {
  try {
    return isWanted(JSON.parse(text)) ? "" : expected;
  } catch (error) {
    return error.message;
  }
}

/** A switch, an editor of JSON and examples for it. */
class Editor {
  constructor({name, label, note, examples, isWanted, expected, onchange}) {
    Object.assign(this, {name, isWanted, expected, onchange});
    this.isOn = el("input", {type: "checkbox", onchange: () => this.change()});
    this.text = el("textarea", {rows: "12", class: "mono", spellcheck: "false", "aria-label": label, oninput: () => this.change()});
    this.problem = el("p", {class: "problem", role: "status"});
    const choice = el("select", {"aria-label": `Examples: ${label}`, onchange: () => {
      this.text.value = pretty(examples[choice.value]);
      choice.selectedIndex = 0;
      this.isOn.checked = true;
      this.change();
    }}, el("option", {value: ""}, "Examples"), Object.keys(examples).map((key) => el("option", null, key)));
    this.first = pretty(Object.values(examples)[0]);
    this.more = el("div", {class: "stack"});
    this.element = el("section", {class: "stack"},
      el("label", {class: "check"}, this.isOn, el("b", null, label)), el("p", {class: "note"}, note),
      el("div", {class: "row"}, choice, el("button", {type: "button", onclick: () => this.format()}, "Format")), this.text, this.problem, this.more);
  }

  show({isOn = false, text = this.first} = {}) {
    this.isOn.checked = isOn;
    this.text.value = text;
    this.check();
  }

  check() {
    const problem = problemOf(this.text.value, this.isWanted, this.expected);
    this.problem.textContent = problem;
    this.text.setAttribute("aria-invalid", problem !== "");
    return problem === "";
  }

  change() {
    const isGood = this.check();
    this.onchange({isOn: this.isOn.checked && isGood, text: this.text.value});
  }

  format() {
    if (!this.check()) return;
    this.text.value = pretty(JSON.parse(this.text.value));
    this.change();
  }
}

export class Playground {
  constructor(chat) {
    this.chat = chat;
    this.format = new Editor({
      label: "JSON schema", note: "Answers follow this schema (response_format).", examples: SCHEMAS,
      isWanted: (value) => typeof value === "object" && value !== null && !Array.isArray(value), expected: "A schema is an object.",
      onchange: (value) => this.keep("format", value),
    });
    this.tools = new Editor({
      label: "Tools", note: "The model may call these functions. You give the results.", examples: TOOLS,
      isWanted: (value) => Array.isArray(value) && value.every((one) => one?.function?.name), expected: "Tools are a list of functions.",
      onchange: (value) => { this.keep("tools", {...value, choice: this.choice.value}); this.fillChoice(); },
    });
    this.choice = el("select", {id: "tool-choice", onchange: () => this.tools.change()});
    this.tools.more.append(el("div", {class: "field"}, el("label", {for: "tool-choice"}, "tool_choice"), this.choice));
    this.element = el("div", {class: "stack"}, this.format.element, this.tools.element);
  }

  keep(name, value) {
    this.chat.conversation.settings[name] = value;
    this.chat.save();
    this.chat.showMarks();
  }

  fillChoice(chosen = this.choice.value) {
    let names = [];
    try { names = JSON.parse(this.tools.text.value).map((one) => one.function.name); } catch { /* is being typed */ }
    this.choice.replaceChildren(...["", "auto", "required", "none", ...names].map((name) => el("option", {value: name, selected: name === chosen}, name || "unset")));
  }

  update() {
    const {format, tools} = this.chat.conversation.settings;
    this.format.show(format);
    this.tools.show(tools);
    this.fillChoice(tools?.choice ?? "");
  }
}
