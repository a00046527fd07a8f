// A conversation is a tree of messages: an edit or another answer begins a branch beside the one before.
//
// {id, title, created, updated, settings, nodes: {id: node}, picked: {parent: child}}; a node is {id, parent, role, content, ...}.

const FORMAT = "archerfish-conversations";
const ROLES = ["user", "assistant", "tool"];
const ROOT = "root";

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings) {
  return {id: newId(), title: "New chat", created: Date.now(), updated: Date.now(), settings, nodes: {}, picked: {}};
}

const childrenOf = (conversation, parent) => Object.values(conversation.nodes).filter((node) => node.parent === parent);

/** The messages that are shown: from the first one along the picked branches. */
export function pathOf(conversation) {
  const path = [];
  for (let parent = null; ;) {
    const children = childrenOf(conversation, parent);
    if (!children.length) return path;
    const picked = conversation.picked[parent ?? ROOT];
    const next = children.find((child) => child.id === picked) ?? children.at(-1);
    path.push(next);
    parent = next.id;
  }
}

/** The messages from the first one to a node. */
export function pathTo(conversation, id) {
  const path = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

export function addNode(conversation, parent, values) {
  const node = {id: newId(), parent, created: Date.now(), content: "", ...values};
  conversation.nodes[node.id] = node;
  pick(conversation, node);
  if (node.role === "user" && !parent && !conversation.isNamed) conversation.title = titleOf(node.content);
  return node;
}

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}...` : line || "New chat";
}

export function pick(conversation, node) {
  conversation.picked[node.parent ?? ROOT] = node.id;
  conversation.updated = Date.now();
}

/** The branches that a message is one of. */
export function siblingsOf(conversation, node) {
  return childrenOf(conversation, node.parent);
}

// Files

export function exportText(conversations) {
  return JSON.stringify({format: FORMAT, version: 1, conversations}, null, 1);
}

/** The conversations of a file. Those whose ids are taken get new ones. */
export function importText(text, takenIds) {
  let data;
  try { data = JSON.parse(text); } catch { throw new Error("The file is not JSON."); }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("The file holds no conversations of archerfish.");
  return data.conversations.map((given) => {
    const id = typeof given?.id === "string" && !takenIds.includes(given.id) ? given.id : newId();
    return {id, ...checked(given)};
  });
}

// Kinds of values in a file: each gives a copy of the members that it knows, and throws at a value of another kind.
const plain = (type) => (value) => (typeof value === type ? value : refuse());
const TEXT = plain("string"), NUMBER = plain("number"), FLAG = plain("boolean");
const maybe = (read) => (value) => (value === undefined ? undefined : read(value));
const list = (read) => (value) => (Array.isArray(value) ? value.map((one) => read(one)) : refuse());
const pair = (first, second) => (value) => (Array.isArray(value) && value.length === 2 ? [first(value[0]), second(value[1])] : refuse());
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const map = (read) => (value) => (
  isObject(value) ? Object.fromEntries(Object.entries(value).map(([name, one]) => [name, read(one)])) : refuse());
const record = (kinds) => (value) => {
  if (!isObject(value)) refuse();
  const names = new Set([...Object.keys(value), ...Object.keys(kinds)].filter((name) => Object.hasOwn(kinds, name)));
  return Object.fromEntries([...names].map((name) => [name, kinds[name](value[name])]).filter(([, one]) => one !== undefined));
};
const USAGE = record({prompt: NUMBER, output: NUMBER, cached: NUMBER});
const NODE = record({
  id: TEXT, parent: (value) => (value === null ? null : TEXT(value)), created: maybe(NUMBER), content: TEXT,
  role: (value) => (ROLES.includes(value) ? value : refuse()), isJson: maybe(FLAG), model: maybe(TEXT), callId: maybe(TEXT), reasoning: maybe(TEXT),
  calls: maybe(list(record({id: TEXT, name: TEXT, text: TEXT}))), usage: maybe(USAGE), finish: maybe(TEXT), isStopped: maybe(FLAG), remark: maybe(TEXT),
  tokens: maybe(list(record({bytes: list(NUMBER), logprob: NUMBER, top: list(pair(TEXT, NUMBER))}))), firstMs: maybe(NUMBER), totalMs: maybe(NUMBER),
  error: maybe(record({message: TEXT, hint: TEXT, status: NUMBER})),
});
const SETTINGS = record({
  model: maybe(TEXT), system: maybe(TEXT), params: maybe(map((value) => value)), tokens: maybe(FLAG),
  format: maybe(record({isOn: FLAG, text: TEXT})), tools: maybe(record({isOn: FLAG, text: TEXT, choice: maybe(TEXT)})),
});
const CONVERSATION = record({
  title: (value = "Imported") => TEXT(value), created: (value) => Number(value) || Date.now(), updated: (value) => Number(value) || Date.now(),
  settings: (value = {}) => SETTINGS(value), nodes: map(NODE), picked: (value = {}) => map(TEXT)(value), isNamed: maybe(FLAG),
});

function refuse() {
  throw new Error("The file has a conversation that is not whole.");
}

function checked(given) {
  const conversation = CONVERSATION(given), {nodes} = conversation;
  if (!Object.entries(nodes).every(([id, node]) => node.id === id && reaches(nodes, node))) refuse();
  return conversation;
}

/** Whether the parents of a node lead to the root. */
function reaches(nodes, node) {
  const seen = new Set();
  for (let at = node; at.parent !== null; at = nodes[at.parent]) {
    if (seen.has(at.id) || !nodes[at.parent]) return false;
    seen.add(at.id);
  }
  return true;
}
