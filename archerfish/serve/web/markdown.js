// Markdown as a tree: a node is a text or {tag, children, ...attributes}. HTML in the source stays text.

import {parseInline} from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;
const MAX_DEPTH = 30; // of lists and quotes in each other; deeper ones are text
const MAX_COLUMNS = 100; // of a table: a short row is filled up to them

/** The top-level blocks of a text, each with the offset at which it starts. A text that grows changes its last block alone. */
export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const offsets = [0];
  for (const line of lines) offsets.push(offsets.at(-1) + line.length + 1);
  return parseBlocks(lines, 0).map(({start, node}) => ({offset: offsets[start], node}));
}

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;
const nodesOf = (lines, depth) => parseBlocks(lines, depth).map(({node}) => node);

function parseBlocks(lines, depth) {
  const blocks = [];
  const readers = depth > MAX_DEPTH ? [readParagraph] : [readFence, readHeading, readRule, readQuote, readList, readTable, readIndented, readParagraph];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at++; continue; }
    for (const read of readers) {
      const found = read(lines, at, depth);
      if (!found) continue;
      blocks.push({start: at, node: found.node});
      at = found.end;
      break;
    }
  }
  return blocks;
}

function readFence(lines, start) {
  const open = FENCE.exec(lines[start]);
  if (!open) return null;
  const [, indent, marks, info] = open;
  const close = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
  let end = start + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const body = lines.slice(start + 1, end).map((line) => line.slice(Math.min(indent.length, indentOf(line))));
  return {node: codeNode(body, info.trim().split(/\s/)[0], end < lines.length), end: end + 1};
}

const codeNode = (lines, lang, isClosed) => ({tag: "pre", lang, isClosed, children: [lines.join("\n")]});

function readIndented(lines, start) {
  if (!/^(?: {4}|\t)/.test(lines[start])) return null;
  let end = start;
  while (end < lines.length && (isBlank(lines[end]) || /^(?: {4}|\t)/.test(lines[end]))) end++;
  const body = lines.slice(start, end).map((line) => line.replace(/^(?: {4}|\t)/, ""));
  while (isBlank(body.at(-1))) body.pop();
  return {node: codeNode(body, "", true), end};
}

function readHeading(lines, start) {
  const found = HEADING.exec(lines[start]);
  return found && {node: {tag: `h${found[1].length}`, children: parseInline(withoutSigns((found[2] ?? "").trim()))}, end: start + 1};
}

/** The text of a heading without the number signs that close it. */
function withoutSigns(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || text[end - 1] === " " || text[end - 1] === "\t" ? text.slice(0, end).trimEnd() : text;
}

function readRule(lines, start) {
  return RULE.test(lines[start]) ? {node: {tag: "hr", children: []}, end: start + 1} : null;
}

/** Whether a line begins something that ends a paragraph before it. */
function interrupts(line) {
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || Boolean(item && item[4] && (/^[-*+]/.test(item[2]) || parseInt(item[2], 10) === 1));
}

function readQuote(lines, start, depth) {
  if (!QUOTE.test(lines[start])) return null;
  const body = [];
  let end = start;
  for (; end < lines.length && !isBlank(lines[end]); end++) {
    if (!QUOTE.test(lines[end]) && interrupts(lines[end])) break;
    body.push(lines[end].replace(QUOTE, ""));
  }
  return {node: {tag: "blockquote", children: nodesOf(body, depth + 1)}, end};
}

function readList(lines, start, depth) {
  const first = ITEM.exec(lines[start]);
  if (!first || first[1].length > 3) return null;
  const kind = first[2].at(-1), base = first[1].length;
  const items = [];
  let end = start, isLoose = false, isAfterBlank = false;
  while (end < lines.length) {
    const line = lines[end], item = ITEM.exec(line), indent = indentOf(line);
    if (isBlank(line)) {
      isAfterBlank = true;
      items.at(-1).body.push("");
    } else if (item && indent < base + 2 && item[2].at(-1) === kind && !RULE.test(line)) {
      if (isAfterBlank && items.length) isLoose = true;
      const width = indent + item[2].length + (item[3] && item[3].length <= 4 && item[4] ? item[3].length : 1);
      items.push({width, body: [line.slice(width)]});
      isAfterBlank = false;
    } else if (indent >= items.at(-1)?.width || (item && indent >= base + 2)) {
      if (isAfterBlank && !item) isLoose = true;
      items.at(-1).body.push(line.slice(Math.min(indent, items.at(-1).width)));
      isAfterBlank = false;
    } else if (!isAfterBlank && !interrupts(line)) {
      items.at(-1).body.push(line.trimStart());
    } else break;
    end++;
  }
  while (isBlank(lines[end - 1])) end--;
  const children = items.map(({body}) => itemNode(nodesOf(body, depth + 1), isLoose));
  const isNumbered = /\d/.test(first[2]);
  return {node: {tag: isNumbered ? "ol" : "ul", ...(isNumbered && {start: parseInt(first[2], 10)}), children}, end};
}

/** An item; in a list without blank lines, its paragraphs are plain text. */
function itemNode(blocks, isLoose) {
  const children = isLoose ? blocks : blocks.flatMap((block) => (block.tag === "p" ? block.children : [block]));
  const holder = isLoose && blocks[0]?.tag === "p" ? blocks[0] : {children};
  const task = typeof holder.children[0] === "string" && /^\[([ xX])\] /.exec(holder.children[0]);
  if (task) holder.children[0] = (task[1] === " " ? "\u2610 " : "\u2611 ") + holder.children[0].slice(4);
  return {tag: "li", children};
}

/** The cells of a row of a table: bars in code and behind backslashes do not part them. */
function cellsOf(line) {
  const cells = [""];
  let ticks = 0;
  for (let at = 0, text = line.trim().replace(/^\|/, ""); at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") { cells[cells.length - 1] += "|"; at++; continue; }
    if (text[at] === "`") ticks++;
    if (text[at] === "|" && ticks % 2 === 0) cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (isBlank(cells.at(-1)) && cells.length > 1) cells.pop();
  return cells.map((cell) => cell.trim());
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !DELIMITERS.test(lines[at + 1])) return false;
  const numColumns = cellsOf(lines[at]).length;
  return numColumns <= MAX_COLUMNS && numColumns === cellsOf(lines[at + 1]).length;
}

function readTable(lines, start) {
  if (!isTable(lines, start)) return null;
  const aligns = cellsOf(lines[start + 1]).map((cell) => {
    const isRight = cell.endsWith(":");
    return cell.startsWith(":") ? (isRight ? "center" : "left") : (isRight ? "right" : "");
  });
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return {tag: "tr", children: aligns.map((align, i) => ({tag, align, children: parseInline(cells[i] ?? "")}))};
  };
  let end = start + 2;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines[end])) end++;
  const head = {tag: "thead", children: [row(lines[start], "th")]};
  const body = {tag: "tbody", children: lines.slice(start + 2, end).map((line) => row(line, "td"))};
  return {node: {tag: "table", children: body.children.length ? [head, body] : [head]}, end};
}

function readParagraph(lines, start, depth) {
  let end = start + 1, level = 0;
  while (end < lines.length && !isBlank(lines[end]) && depth <= MAX_DEPTH) {
    const underline = /^ {0,3}(=+|-+)[ \t]*$/.exec(lines[end]);
    if (underline) { level = underline[1][0] === "=" ? 1 : 2; break; }
    if (interrupts(lines[end]) || isTable(lines, end)) break;
    end++;
  }
  const text = lines.slice(start, end).map((line) => line.trimStart()).join("\n").trimEnd();
  const children = parseInline(text);
  return level ? {node: {tag: `h${level}`, children}, end: end + 1} : {node: {tag: "p", children}, end};
}
