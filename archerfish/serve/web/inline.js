// The inside of a block of Markdown: code, emphasis, links, line breaks. Links lead to http, https and mailto alone.

const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const ESCAPED = /[!-/:-@[-`{-~]/;
const AUTOLINK = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/i;
const BARE = /^https?:\/\/[^\s<>"'`]+/i;
const ENTITY = /^&(amp|lt|gt|quot|apos|nbsp|#39);/;
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'"};
const TAGS = {"*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"]};

/** An address that a link may have, or null. */
export function safeUrl(address) {
  const text = address.trim();
  if (!/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** The nodes of a text. */
export function parseInline(text) {
  return new Inline(text).parse();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = []; // texts, nodes and runs of delimiters: {mark, count, canOpen, canClose}
    this.brackets = []; // places of open ones in parts
    this.ticks = new Map(); // lengths of runs of backticks, and where there are no more of them
  }

  parse() {
    while (this.at < this.text.length) this.step();
    return merged(emphasised(this.parts, 0));
  }

  push(text) {
    if (typeof this.parts.at(-1) === "string") this.parts[this.parts.length - 1] += text;
    else this.parts.push(text);
  }

  step() {
    const {text, at} = this, mark = text[at];
    if (mark === "\\") this.escape();
    else if (mark === "`") this.code();
    else if (mark === "\n") this.lineBreak();
    else if (mark in TAGS) this.run(mark);
    else if (mark === "[" || (mark === "!" && text[at + 1] === "[")) this.open(mark === "!" ? 2 : 1);
    else if (mark === "]") this.close();
    else if (mark === "<" || mark === "&" || mark === "h" || mark === "H") this.special(mark);
    else {
      const plain = /^[^\\`\n*_~[\]!<&hH]+/.exec(text.slice(at, at + 1000));
      this.push(plain ? plain[0] : mark);
      this.at += plain ? plain[0].length : 1;
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return void (this.parts.push({tag: "br", children: []}), this.at += 2);
    const isEscape = next !== undefined && ESCAPED.test(next);
    this.push(isEscape ? next : "\\");
    this.at += isEscape ? 2 : 1;
  }

  code() {
    const {text, at} = this;
    let end = at;
    while (text[end] === "`") end++;
    const length = end - at;
    for (let from = end; from < text.length && !(this.ticks.get(length) <= from);) {
      const start = text.indexOf("`", from);
      if (start < 0) break;
      let close = start;
      while (text[close] === "`") close++;
      if (close - start === length) {
        const inner = text.slice(end, start).replace(/\n/g, " ");
        const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
        this.parts.push({tag: "code", children: [isPadded ? inner.slice(1, -1) : inner]});
        this.at = close;
        return;
      }
      from = close;
    }
    this.ticks.set(length, Math.min(at, this.ticks.get(length) ?? at));
    this.push(text.slice(at, end));
    this.at = end;
  }

  lineBreak() {
    const last = this.parts.length - 1;
    if (typeof this.parts[last] === "string") this.parts[last] = this.parts[last].trimEnd();
    this.parts.push({tag: "br", children: []});
    this.at++;
    while (this.text[this.at] === " ") this.at++;
  }

  run(mark) {
    const {text, at} = this;
    let end = at;
    while (text[end] === mark) end++;
    const count = end - at, before = text[at - 1] ?? " ", after = text[end] ?? " ";
    this.at = end;
    if (mark === "~" && count !== 2) return this.push(text.slice(at, end));
    const isLeft = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const isRight = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const canOpen = isLeft && (mark !== "_" || !isRight || PUNCTUATION.test(before));
    const canClose = isRight && (mark !== "_" || !isLeft || PUNCTUATION.test(after));
    this.parts.push({mark, count, size: count, canOpen, canClose});
  }

  special(mark) {
    const rest = this.text.slice(this.at, this.at + 2048);
    const isWordStart = !/[\p{L}\p{N}_]/u.test(this.text[this.at - 1] ?? " ");
    const link = mark === "<" ? AUTOLINK.exec(rest) : isWordStart && BARE.exec(rest);
    const entity = mark === "&" && ENTITY.exec(rest);
    if (link) {
      const shown = mark === "<" ? link[1] : trimmedUrl(link[0]), url = safeUrl(shown);
      if (url) {
        this.parts.push({tag: "a", href: url, children: [shown]});
        this.at += mark === "<" ? link[0].length : shown.length;
        return;
      }
    }
    this.push(entity ? ENTITIES[entity[1]] : mark);
    this.at += entity ? entity[0].length : 1;
  }

  open(length) {
    this.brackets.push(this.parts.length);
    this.parts.push({bracket: this.text.slice(this.at, this.at + length)});
    this.at += length;
  }

  close() {
    const start = this.brackets.pop();
    const found = start === undefined ? null : targetOf(this.text, this.at + 1);
    if (!found) {
      this.push("]");
      this.at++;
      return;
    }
    const isImage = this.parts[start].bracket === "![";
    const inner = merged(emphasised(this.parts.splice(start).slice(1), 0));
    const children = inner.length ? inner : isImage ? ["image"] : [found.address];
    const url = safeUrl(found.address);
    this.parts.push(url && !hasLink(inner) ? {tag: "a", href: url, children} : {tag: "span", children});
    this.at = found.end;
  }
}

const hasLink = (nodes) => nodes.some((node) => typeof node !== "string" && (node.tag === "a" || hasLink(node.children)));

/** `(address "title")` at a place of a text. */
function targetOf(text, at) {
  const found = /^\([ \n]*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:[ \n]+(?:"[^"]*"|'[^']*'))?[ \n]*\)/
    .exec(text.slice(at, at + 4096));
  return found && {address: (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"), end: at + found[0].length};
}

/** A bare address without the punctuation that ends its sentence. */
function trimmedUrl(url) {
  let shown = url.replace(/[?!.,:;*_~]+$/, "");
  while (shown.endsWith(")") && shown.split(")").length > shown.split("(").length) shown = shown.slice(0, -1);
  return shown.replace(/[?!.,:;*_~]+$/, "");
}

/** Parts with their runs of delimiters paired, after the rules of CommonMark. */
function emphasised(parts, first) {
  const floors = {}; // below these places no run of a kind opens
  for (let at = first; at < parts.length; at++) {
    const closer = parts[at];
    if (!closer?.canClose || !closer.count) continue;
    const kind = `${closer.mark}${closer.size % 3}${closer.canOpen}`;
    const from = openerBefore(parts, at, closer, floors[kind] ?? first);
    if (from < 0) {
      floors[kind] = at;
      continue;
    }
    const opener = parts[from], length = Math.min(2, opener.count, closer.count);
    const inner = merged(parts.slice(from + 1, at));
    opener.count -= length;
    closer.count -= length;
    parts.splice(from + 1, at - from - 1, {tag: TAGS[closer.mark][length - 1], children: inner});
    for (const name of Object.keys(floors)) floors[name] = Math.min(floors[name], from + 1);
    at = from + 1; // the closer is looked at again
  }
  return parts;
}

function openerBefore(parts, at, closer, floor) {
  for (let from = at - 1; from >= floor; from--) {
    const opener = parts[from];
    if (opener.mark !== closer.mark || !opener.canOpen || !opener.count) continue;
    const isOdd = (opener.canClose || closer.canOpen) && (opener.size + closer.size) % 3 === 0
      && (opener.size % 3 !== 0 || closer.size % 3 !== 0);
    if (!isOdd) return from;
  }
  return -1;
}

/** Texts and nodes, in which brackets and delimiters that paired with nothing are text. */
function merged(parts) {
  const found = [];
  for (const part of parts) {
    const node = part.mark ? part.mark.repeat(part.count) : part.bracket ?? part;
    if (node === "") continue;
    if (typeof node === "string" && typeof found.at(-1) === "string") found[found.length - 1] += node;
    else found.push(node);
  }
  return found;
}
