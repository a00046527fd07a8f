// One message of a conversation on the page.

import {statistics} from "./answer.js";
import {siblingsOf} from "./conversations.js";
import {copyButton, el, errorBox, icon, iconButton} from "./dom.js";
import {codeBlock, MarkdownView} from "./render.js";
import {TokensView} from "./tokens.js";

const LABELS = {user: "You", assistant: "Answer", tool: "Result of a tool"};

export class MessageView {
  /** chat: what is done with messages: edit, retry, resume, turn, giveResults. */
  constructor(node, chat) {
    Object.assign(this, {node, chat, shown: ""});
    this.body = el("div", {class: "body"});
    this.extra = el("div");
    this.foot = el("div", {class: "foot"});
    this.element = el("article", {class: `message ${node.role}`, "aria-label": LABELS[node.role]}, this.body, this.extra, this.foot);
  }

  /** isRunning: more of the answer will come. */
  update(isRunning = false) {
    const {node} = this;
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", isRunning);
    if (this.editor) return;
    this.showReasoning(isRunning);
    const form = this.formOf(isRunning);
    if (form !== this.shown) {
      this.shown = form;
      this.content?.remove();
      this.content = el("div", {class: form === "markdown" ? "markdown" : form});
      this.body.append(this.content);
      this.view = form === "markdown" ? new MarkdownView(this.content) : form === "tokens" ? new TokensView(this.content) : null;
    }
    if (form === "tokens") this.view.update(node.tokens);
    else if (form === "markdown") this.view.update(node.content);
    else if (form === "json") this.showJson();
    else this.content.textContent = form === "waiting" ? "" : node.content;
    this.showExtra(isRunning);
    this.showFoot(isRunning);
  }

  formOf(isRunning) {
    const {node} = this;
    if (node.role !== "assistant") return "plain";
    if (isRunning && !node.content && !node.reasoning && !node.calls) return "waiting";
    if (node.tokens && this.chat.conversation.settings.tokens) return "tokens";
    return node.isJson && !isRunning && node.content ? "json" : "markdown";
  }

  showJson() {
    let text = this.node.content, problem = null;
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch (error) { problem = error.message; }
    this.content.replaceChildren(codeBlock({lang: "json", children: [text]}),
      el("p", {class: problem ? "badge bad" : "badge good"}, !problem ? "Valid JSON" : this.node.finish === "length" ? "Cut off before the end of the JSON" : `Not valid JSON: ${problem}`));
  }

  showReasoning(isRunning) {
    const {node} = this;
    if (!node.reasoning) return;
    if (!this.reasoning) {
      this.reasoningText = el("div", {class: "markdown"});
      this.reasoningView = new MarkdownView(this.reasoningText);
      this.reasoningTitle = el("summary");
      this.reasoning = el("details", {class: "reasoning"}, this.reasoningTitle, this.reasoningText);
      this.body.prepend(this.reasoning);
    }
    this.reasoningTitle.textContent = isRunning && !node.content ? "Thinking \u2026" : "Reasoning";
    this.reasoningView.update(node.reasoning);
  }

  showExtra(isRunning) {
    const {node, chat} = this;
    const parts = (node.calls ?? []).map((call) => this.callCard(call));
    const isLast = !isRunning && chat.isLast(node);
    if (node.calls?.length && isLast) parts.push(this.resultForm());
    if (node.error) parts.push(errorBox(node.error, isLast && (() => chat.retry(node))));
    const state = JSON.stringify([node.calls, node.error, isLast]);
    if (state === this.extraState) return;
    this.extraState = state;
    this.extra.replaceChildren(...parts);
  }

  callCard({name, text}) {
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not complete yet */ }
    return el("div", {class: "call-card"}, el("p", null, "Calls ", el("b", null, name)), codeBlock({lang: "arguments", children: [shown]}));
  }

  resultForm() {
    const {node, chat} = this;
    const fields = node.calls.map(({name}) => el("textarea", {rows: "2", "aria-label": `Result of ${name}`, placeholder: `What ${name} gives back`}));
    const submit = (event) => {
      event.preventDefault();
      chat.giveResults(node, fields.map((field) => field.value));
    };
    return el("form", {class: "results", onsubmit: submit}, fields, el("div", {class: "row end"}, el("button", {class: "primary"}, "Continue")));
  }

  showFoot(isRunning) {
    const {node, chat} = this, {role} = node;
    const told = role === "assistant" ? statistics(node) : [];
    const siblings = siblingsOf(chat.conversation, node);
    const state = JSON.stringify([isRunning, told, siblings.length, siblings.indexOf(node), chat.isRunning]);
    if (state === this.footState) return;
    this.footState = state;
    if (isRunning) return this.foot.replaceChildren(el("span", {class: "stats"}, told.slice(0, 2).join(" \u00b7 ")));
    const actions = [this.turner(siblings)];
    if (node.content) actions.push(copyButton(() => node.content, "Copy the message"));
    if (!chat.isRunning) {
      if (role !== "tool") actions.push(iconButton("edit", role === "user" ? "Edit and send" : "Edit the answer", () => this.edit()));
      if (role === "assistant") actions.push(iconButton("retry", "Another answer", () => chat.retry(node)));
      const isCut = node.isStopped || node.finish === "length";
      if (isCut && node.content && !node.calls && chat.isLast(node)) actions.push(iconButton("play", "Continue the answer", () => chat.resume(node)));
    }
    this.foot.replaceChildren(el("div", {class: "actions"}, actions), el("span", {class: "stats"}, told.join(" \u00b7 ")));
  }

  /** The switch between the branches that begin here. */
  turner(siblings) {
    if (siblings.length < 2) return null;
    const {node, chat} = this, at = siblings.indexOf(node);
    return el("span", {class: "turner", role: "group", "aria-label": "Branches"},
      iconButton("left", "Branch before", () => chat.turn(siblings[at - 1]), {disabled: at === 0 || chat.isRunning}),
      el("span", null, `${at + 1}/${siblings.length}`),
      iconButton("right", "Next branch", () => chat.turn(siblings[at + 1]), {disabled: at === siblings.length - 1 || chat.isRunning}));
  }

  edit() {
    const {node, chat} = this, isUser = node.role === "user";
    const field = el("textarea", {"aria-label": "Text of the message", value: node.content, rows: Math.min(12, node.content.split("\n").length + 1)});
    const close = () => {
      this.editor.remove();
      this.editor = null;
      for (const part of [this.body, this.foot]) part.hidden = false;
      this.update();
    };
    const submit = (event) => {
      event?.preventDefault();
      const text = field.value;
      close();
      if (text.trim() && (text !== node.content || isUser)) chat.edit(node, text);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && isUser && !event.isComposing) submit(event);
    });
    this.editor = el("form", {class: "editor", onsubmit: submit}, field,
      el("div", {class: "row end"}, el("button", {type: "button", onclick: close}, "Cancel"),
        el("button", {class: "primary"}, isUser ? "Send as a new branch" : "Keep as a new branch")));
    for (const part of [this.body, this.foot]) part.hidden = true;
    this.element.prepend(this.editor);
    field.focus();
  }
}

/** What an empty conversation shows. */
export function greeting(model, suggestions, onchoose) {
  return el("div", {class: "greeting"},
    el("img", {src: "/favicon.ico", alt: "", width: "56", height: "56"}),
    el("h1", null, "What shall we talk about?"),
    el("p", {class: "note"}, `${model} answers from this server. Conversations stay in this browser.`),
    el("div", {class: "suggestions"}, suggestions.map((text) => el("button", {type: "button", onclick: () => onchoose(text)}, icon("chat"), text))));
}
