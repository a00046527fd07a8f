// The tabs, the models, the switch of the theme, the API key and the shortcuts.

import {askForKey, get} from "./api.js";
import {el, errorBox, iconButton, openDialog} from "./dom.js";
import {recall, remember} from "./store.js";

const TABS = {
  chat: () => import("./chat.js"),
  texts: () => import("./texts.js"),
  engine: () => import("./engine.js"),
  calls: () => import("./calls.js"),
};
const NAMES = Object.keys(TABS);
const SHORTCUTS = [
  ["Enter", "send the message"], ["Shift + Enter", "begin a new line"], ["Esc", "stop the answer"],
  ["\u2191", "edit the last message, in an empty field"], ["/", "go to the field for messages"],
  ["Alt + N", "new chat"], ["Alt + R", "another answer"], ["Alt + S", "settings and playground"],
  ["Alt + 1 \u2026 4", "Chat, Texts, Engine, Calls"], ["Alt + T", "light or dark"], ["?", "this list"],
];

const app = {
  models: [],
  /** The chosen model of a kind, or the first one. */
  model(kind) {
    const found = this.models.filter((model) => model.kind === kind);
    return found.find((model) => model.id === recall(`model.${kind}`)) ?? found[0];
  },
  choose(kind, id) {
    remember(`model.${kind}`, id);
  },
};
const tabs = {}; // those that have been shown
let current = null;

/** The tab of the address, or the first one for which there is a model. */
function wanted() {
  const name = location.hash.slice(1);
  if (NAMES.includes(name)) return name;
  if (!app.models.length || app.model("generation")) return "chat";
  return app.model("embedding") || app.model("cross-encoder") ? "texts" : "calls";
}

async function showTab() {
  const name = wanted();
  if (name === current) return;
  const before = current;
  current = name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const one of NAMES) document.getElementById(`tab-${one}`).hidden = one !== name;
  if (tabs[before]?.hide) tabs[before].hide();
  const section = document.getElementById(`tab-${name}`);
  if (!tabs[name]) {
    try {
      tabs[name] = await TABS[name]();
      await tabs[name].mount(section, app);
    } catch (error) {
      delete tabs[name];
      current = null;
      section.replaceChildren(errorBox(error, () => { section.replaceChildren(); showTab(); }));
      return;
    }
  }
  if (current === name) tabs[name].show?.();
}

async function start() {
  const first = document.getElementById(`tab-${wanted()}`);
  try {
    app.models = (await get("/v1/models")).data;
  } catch (error) {
    first.replaceChildren(errorBox(error, () => { first.replaceChildren(); start(); }));
    return;
  }
  await showTab();
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("archerfish.theme", root.dataset.theme); } catch { /* it lasts until the page is left */ }
  dispatchEvent(new Event("themechange"));
}

function showShortcuts() {
  openDialog("Shortcuts", (close) => [
    el("dl", {class: "keys"}, SHORTCUTS.map(([keys, text]) => el("div", null, el("dt", null, el("kbd", null, keys)), el("dd", null, text)))),
    el("div", {class: "row end"}, el("button", {type: "button", autofocus: true, onclick: () => close()}, "Close")),
  ]);
}

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("input, textarea, select");
  if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const key = event.code.replace(/^(Digit|Key)/, "");
    if (NAMES[key - 1]) location.hash = NAMES[key - 1];
    else if (key === "T") switchTheme();
    else if (!(current === "chat" && tabs.chat?.onShortcut?.(`Alt+${key}`))) return;
    event.preventDefault();
  } else if (event.key === "?" && !isTyping) {
    event.preventDefault();
    showShortcuts();
  } else if (current === "chat" && tabs.chat?.onShortcut?.(event.key, isTyping)) {
    event.preventDefault();
  }
}

document.getElementById("tools").append(
  iconButton("key", "API key", () => askForKey()),
  iconButton("theme", "Light or dark", switchTheme),
  iconButton("help", "Shortcuts", showShortcuts, {class: "plain wide-only"}),
);
addEventListener("hashchange", showTab);
addEventListener("keydown", onKey);
start();
