// Where conversations are kept: IndexedDB of this browser. Where there is none, they last until the page is left.

const TABLE = "conversations";
const memory = new Map();
let opening = null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function open() {
  opening ??= new Promise((resolve) => {
    if (!globalThis.indexedDB) return resolve(null);
    const request = indexedDB.open("archerfish", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opening;
}

async function table(mode) {
  const database = await open();
  return database && database.transaction(TABLE, mode).objectStore(TABLE);
}

export async function isLasting() {
  return (await open()) !== null;
}

/** All conversations, the latest first. */
export async function all() {
  const found = await table("readonly");
  const list = found ? await done(found.getAll()) : [...memory.values()];
  return list.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  const found = await table("readwrite");
  if (found) await done(found.put(conversation));
  else memory.set(conversation.id, conversation);
}

export async function remove(id) {
  const found = await table("readwrite");
  if (found) await done(found.delete(id));
  else memory.delete(id);
}

// Small values of the page itself

export function remember(name, value) {
  try { localStorage.setItem(`archerfish.${name}`, JSON.stringify(value)); } catch { /* full or switched off */ }
}

export function recall(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(`archerfish.${name}`)) ?? otherwise; } catch { return otherwise; }
}
