// The chat: the open conversation, what is done with its messages, and the field for the next one.

import {bodyOf, fillAnswer} from "./answer.js";
import {addNode, newConversation, pathOf, pathTo, pick} from "./conversations.js";
import {el, icon, iconButton, say} from "./dom.js";
import {greeting, MessageView} from "./message.js";
import {Panel} from "./settings.js";
import {Sidebar} from "./sidebar.js";
import * as store from "./store.js";

const SUGGESTIONS = ["Tell a short story about an archerfish", "A table of three fish and where they live", "Write a Python function that reverses a string"];
const SAVE_MS = 1000; // between two savings of an answer that is being written
let chat = null;

export async function mount(section, app) {
  if (!app.model("generation")) {
    section.append(el("div", {class: "page"}, el("h1", null, "No model for chats is served"),
      el("p", null, "Serve one that generates text: ", el("code", null, "archerfish serve smollm2-135m-instruct"), ". The other tabs show what this server does.")));
    return;
  }
  chat = new Chat(app);
  await chat.load();
  section.append(chat.element);
  chat.open(chat.conversations.find(({id}) => id === store.recall("open")) ?? chat.fresh());
}

export const show = () => chat?.field.focus({preventScroll: true});
export const onShortcut = (key, isTyping) => chat?.onShortcut(key, isTyping) ?? false;

class Chat {
  constructor(app) {
    this.app = app;
    this.conversations = [];
    this.conversation = this.fresh();
    this.runs = new Map(); // of answers that are being written: {controller, node} by the ids of conversations
    this.views = new Map(); // by the ids of nodes
    this.sidebar = new Sidebar(this);
    this.panel = new Panel(this);
    const models = app.models.filter((model) => model.kind === "generation");
    this.model = el("select", {"aria-label": "Model", onchange: () => this.chooseModel()}, models.map(({id}) => el("option", null, id)));
    this.title = el("h1", {class: "unseen"});
    this.messages = el("div", {class: "messages", role: "log", "aria-label": "Messages"});
    this.thread = el("div", {class: "thread", tabindex: "-1", onscroll: () => this.onScroll()}, this.messages);
    this.down = iconButton("down", "To the end", () => this.scrollDown(true), {class: "plain down", hidden: true});
    this.element = el("div", {class: "chat"}, this.sidebar.element,
      el("div", {class: "talk"},
        el("div", {class: "talk-head"}, this.title, iconButton("menu", "Conversations", () => this.toggleSidebar()), this.model,
          el("span", {class: "space"}), iconButton("sliders", "Settings and playground", () => this.togglePanel(), {"aria-expanded": "false"})),
        this.thread, this.down, this.composer()),
      this.panel.element);
    this.panelButton = this.element.querySelector("[aria-expanded]");
    this.thread.addEventListener("click", () => this.element.classList.remove("with-sidebar"));
  }

  composer() {
    const onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(this.field.value); }
      if (event.key === "ArrowUp" && !this.field.value) { event.preventDefault(); this.editLast(); }
    };
    this.field = el("textarea", {rows: "1", "aria-label": "Your message", placeholder: "Send a message", onkeydown, oninput: () => this.fitField()});
    this.tokens = el("button", {type: "button", class: "toggle", title: "Show the tokens of answers and their probabilities", onclick: () => this.toggleTokens()}, "Tokens");
    this.marks = el("span", {class: "marks"});
    this.button = el("button", {class: "primary round"});
    return el("form", {class: "composer", onsubmit: (event) => { event.preventDefault(); if (this.isRunning) this.stop(); else this.send(this.field.value); }},
      this.field, el("div", {class: "row"}, this.tokens, this.marks, el("span", {class: "space"}), this.button));
  }

  get isRunning() {
    return this.runs.has(this.conversation.id);
  }

  // Conversations

  fresh() {
    return newConversation({model: this.app.model("generation").id, system: "", params: store.recall("params", {}), tokens: false});
  }

  async load() {
    this.conversations = await store.all();
  }

  open(conversation) {
    this.conversation = conversation;
    const models = [...this.model.options].map((option) => option.value);
    const {settings} = conversation;
    if (!models.includes(settings.model)) settings.model = this.app.model("generation").id;
    this.model.value = settings.model;
    this.element.classList.remove("with-sidebar");
    this.views.clear();
    this.messages.replaceChildren();
    this.panel.update();
    this.render();
    store.remember("open", conversation.id);
    this.scrollDown(true);
    this.field.focus({preventScroll: true});
  }

  start() {
    this.open(this.fresh());
  }

  /** Keeps the open conversation, once it has a message. */
  save(conversation = this.conversation) {
    if (!Object.keys(conversation.nodes).length) return;
    const others = this.conversations.filter((one) => one !== conversation);
    this.conversations = [conversation, ...others].sort((a, b) => b.updated - a.updated);
    this.sidebar.update();
    return store.save(conversation);
  }

  rename(conversation, title) {
    Object.assign(conversation, {title, isNamed: true});
    this.save(conversation);
  }

  async remove(conversation) {
    this.runs.get(conversation.id)?.controller.abort();
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await store.remove(conversation.id);
    if (conversation === this.conversation) this.start();
    else this.sidebar.update();
  }

  async add(conversations) {
    for (const conversation of conversations) await store.save(conversation);
    await this.load();
    this.open(this.conversations.find(({id}) => id === conversations[0]?.id) ?? this.conversation);
  }

  // Messages

  isLast(node) {
    return pathOf(this.conversation).at(-1) === node;
  }

  send(text) {
    if (!text.trim() || this.isRunning) return;
    this.field.value = "";
    this.fitField();
    const last = pathOf(this.conversation).at(-1);
    const node = addNode(this.conversation, last?.id ?? null, {role: "user", content: text.trim()});
    this.scrollDown(true);
    this.answer(node.id);
  }

  /** Asks for an answer to the message `parent`. */
  answer(parent) {
    const {conversation} = this, {settings} = conversation;
    const node = addNode(conversation, parent, {role: "assistant", isJson: Boolean(settings.format?.isOn)});
    return this.run(conversation, node, () => bodyOf(settings, pathTo(conversation, parent)));
  }

  async run(conversation, node, makeBody) {
    const controller = new AbortController();
    this.runs.set(conversation.id, {controller, node});
    let savedAt = performance.now();
    const onchange = () => {
      this.draw(conversation, node);
      if (performance.now() - savedAt < SAVE_MS) return;
      savedAt = performance.now();
      store.save(conversation);
    };
    this.render();
    this.save(conversation);
    await fillAnswer(node, makeBody, {signal: controller.signal, onchange});
    this.runs.delete(conversation.id);
    if (this.conversations.includes(conversation)) await this.save(conversation);
    if (conversation === this.conversation) this.render();
    say(node.error ? "The answer failed" : node.isStopped ? "Stopped" : "The answer is complete");
  }

  stop() {
    this.runs.get(this.conversation.id)?.controller.abort();
  }

  retry(node) {
    if (!this.isRunning) this.answer(node.parent);
  }

  /** Lets the model go on with an answer that was stopped or cut off. */
  resume(node) {
    const {conversation} = this;
    if (!this.isRunning) this.run(conversation, node, () => bodyOf(conversation.settings, pathTo(conversation, node.id), true));
  }

  edit(node, content) {
    const {conversation} = this;
    const made = addNode(conversation, node.parent, {role: node.role, content, ...(node.model && {model: node.model})});
    if (node.role === "user") this.answer(made.id);
    else {
      this.save();
      this.render();
    }
  }

  editLast() {
    const last = pathOf(this.conversation).filter((node) => node.role === "user").at(-1);
    if (last && !this.isRunning) this.views.get(last.id).edit();
  }

  turn(node) {
    pick(this.conversation, node);
    this.save();
    this.render();
  }

  giveResults(node, texts) {
    let parent = node.id;
    node.calls.forEach(({id}, at) => {
      parent = addNode(this.conversation, parent, {role: "tool", content: texts[at], callId: id}).id;
    });
    this.answer(parent);
  }

  // The view

  /** Shows the open conversation: messages that are on the page already are kept. */
  render() {
    const path = pathOf(this.conversation), shown = new Set(path.map(({id}) => id));
    for (const [id, view] of this.views) {
      if (shown.has(id)) continue;
      view.element.remove();
      this.views.delete(id);
    }
    if (path.length) this.messages.querySelector(".greeting")?.remove();
    else this.messages.replaceChildren(greeting(this.conversation.settings.model, SUGGESTIONS, (text) => this.send(text)));
    const running = this.runs.get(this.conversation.id)?.node;
    path.forEach((node, at) => {
      let view = this.views.get(node.id);
      if (!view) this.views.set(node.id, view = new MessageView(node, this));
      if (this.messages.children[at] !== view.element) this.messages.insertBefore(view.element, this.messages.children[at] ?? null);
      view.update(node === running);
    });
    this.title.textContent = this.conversation.title;
    this.showMarks();
    this.sidebar.update();
    this.scrollDown();
  }

  /** Shows what has come of an answer with the next frame. */
  draw(conversation, node) {
    if (this.frame || conversation !== this.conversation) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.views.get(node.id)?.update(this.runs.get(this.conversation.id)?.node === node);
      this.scrollDown();
    });
  }

  showMarks() {
    const {settings} = this.conversation;
    this.tokens.setAttribute("aria-pressed", Boolean(settings.tokens));
    const marks = [settings.format?.isOn && "JSON schema", settings.tools?.isOn && "Tools", settings.system?.trim() && "System prompt"].filter(Boolean);
    this.marks.replaceChildren(...marks.map((text) => el("span", {class: "badge"}, text)));
    const label = this.isRunning ? "Stop" : "Send";
    this.button.replaceChildren(icon(label.toLowerCase()));
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
  }

  fitField() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, innerHeight / 3)}px`;
  }

  onScroll() {
    const {scrollTop, scrollHeight, clientHeight} = this.thread;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < 80;
    this.down.hidden = this.isAtEnd;
  }

  scrollDown(isForced = false) {
    if (isForced) this.isAtEnd = true;
    if (this.isAtEnd) this.thread.scrollTop = this.thread.scrollHeight;
    this.onScroll();
  }

  chooseModel() {
    this.conversation.settings.model = this.model.value;
    this.app.choose("generation", this.model.value);
    this.save();
    this.panel.update();
    this.render();
  }

  toggleTokens() {
    const {settings} = this.conversation;
    settings.tokens = !settings.tokens;
    this.save();
    this.render();
  }

  toggleSidebar() {
    const isNarrow = matchMedia("(max-width: 50rem)").matches;
    this.element.classList.toggle(isNarrow ? "with-sidebar" : "without-sidebar");
  }

  togglePanel(isShown = this.panel.element.hidden) {
    this.panel.element.hidden = !isShown;
    this.panelButton.setAttribute("aria-expanded", isShown);
    this.panel.update();
    if (!isShown) this.field.focus();
  }

  onShortcut(key, isTyping) {
    if (key === "Escape" && this.isRunning) this.stop();
    else if (key === "/" && !isTyping) this.field.focus();
    else if (key === "Alt+N") this.start();
    else if (key === "Alt+S") this.togglePanel();
    else if (key === "Alt+R" && !this.isRunning && pathOf(this.conversation).at(-1)?.role === "assistant") this.retry(pathOf(this.conversation).at(-1));
    else return false;
    return true;
  }
}
