// The tree of Markdown as elements, and a view that follows a text while it grows.

import {copyButton, el} from "./dom.js";
import {parse} from "./markdown.js";

function elementOf(node) {
  if (typeof node === "string") return node;
  if (node.tag === "pre") return codeBlock(node);
  const children = node.children.map(elementOf);
  if (node.tag === "a") return el("a", {href: node.href, rel: "noopener noreferrer nofollow", target: "_blank"}, children);
  if (node.tag === "table") return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Table"}, el("table", null, children));
  return el(node.tag, {start: node.start, class: node.align ? `to-${node.align}` : null}, children);
}

export function codeBlock({lang, children: [text]}) {
  const code = el("code", null, text);
  return el("div", {class: "code"},
    el("div", {class: "code-head"}, el("span", null, lang || "text"), copyButton(() => code.textContent, "Copy the code")),
    el("pre", {tabindex: "0"}, code));
}

/** Shows Markdown in an element. `update` with a longer text renders its last block again, and leaves those before it. */
export class MarkdownView {
  constructor(holder) {
    this.holder = holder;
    this.text = "";
    this.offset = 0; // where the last block begins
    this.last = null; // its node
  }

  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text.slice(0, this.offset)) || text.includes("\r")) {
      this.offset = 0;
      this.last = null;
      this.holder.replaceChildren();
    }
    const blocks = parse(text.slice(this.offset));
    if (blocks.length && this.last && this.grew(blocks[0].node)) this.last = blocks.shift().node;
    else if (this.last) this.holder.lastChild.remove();
    if (blocks.length) {
      this.holder.append(...blocks.map(({node}) => elementOf(node)));
      this.last = blocks.at(-1).node;
      this.offset += blocks.at(-1).offset;
    }
    this.text = text;
  }

  /** Whether the last block is code to which text was added, which is cheaper than making it anew. */
  grew(node) {
    if (node.tag !== "pre" || this.last.tag !== "pre" || node.lang !== this.last.lang) return false;
    const code = this.holder.lastChild.querySelector("code");
    if (node.children[0].startsWith(code.textContent)) code.append(node.children[0].slice(code.textContent.length));
    else code.textContent = node.children[0];
    return true;
  }
}
