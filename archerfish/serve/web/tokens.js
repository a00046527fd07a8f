// An answer as its tokens, coloured by probability; the alternatives of one are shown when it is pointed at.

import {el} from "./dom.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15]; // probabilities from which a token has the colours 0 to 3; below: 4

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(Math.exp(logprob) < 0.1 ? 2 : 1)} %`;

/** The texts of tokens: the bytes of a character may be spread over several of them. */
export function textsOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({bytes}) => decoder.decode(new Uint8Array(bytes), {stream: true}));
}

export const levelOf = (logprob) => {
  const found = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return found < 0 ? LEVELS.length : found;
};

const visible = (text) => text.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/^ | $/g, "\u2423") || "\u2205";

export class TokensView {
  constructor(holder) {
    this.tip = el("div", {class: "tip", role: "status", hidden: true});
    this.list = el("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens. The arrow keys go from one to the next.",
      onmouseover: (event) => this.show(event.target), onmouseleave: () => this.show(null), onblur: () => this.show(null),
      onkeydown: (event) => this.onKey(event),
    });
    this.tokens = [];
    holder.replaceChildren(this.list, this.tip);
  }

  update(tokens) {
    const texts = textsOf(tokens);
    for (let at = this.list.childElementCount; at < tokens.length; at++) {
      this.list.append(el("span", {class: `token level-${levelOf(tokens[at].logprob)}`}, texts[at]));
    }
    this.tokens = tokens;
    this.texts = texts;
  }

  show(span) {
    this.list.querySelector(".chosen")?.classList.remove("chosen");
    const at = [...this.list.children].indexOf(span);
    this.tip.hidden = at < 0;
    if (at < 0) return;
    span.classList.add("chosen");
    const {logprob, top} = this.tokens[at], chosen = this.texts[at];
    const rows = top.some(([text]) => text === chosen) ? top : [[chosen, logprob], ...top];
    this.tip.replaceChildren(...rows.map(([text, value]) => el("div", {class: text === chosen ? "row chosen" : "row"},
      el("code", null, visible(text)), el("meter", {min: "0", max: "1", value: Math.exp(value), "aria-hidden": "true"}), el("span", null, percent(value)))));
    const box = span.getBoundingClientRect(), frame = this.list.parentElement.getBoundingClientRect();
    const left = Math.min(box.left - frame.left, frame.width - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${box.bottom - frame.top + 4}px`;
  }

  onKey(event) {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (event.key === "Escape") this.show(null);
    if (!step) return;
    event.preventDefault();
    const chosen = this.list.querySelector(".chosen");
    const next = chosen ? (step > 0 ? chosen.nextElementSibling : chosen.previousElementSibling) : this.list.firstElementChild;
    if (next) this.show(next);
  }
}
