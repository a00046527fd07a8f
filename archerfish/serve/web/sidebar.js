// The list of conversations.

import {exportText, importText} from "./conversations.js";
import {confirmDialog, el, icon, iconButton, openDialog, saveFile, say} from "./dom.js";

const DAY_MS = 86_400_000;

function ageOf(updated) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY_MS) return "Yesterday";
  return updated >= midnight - 7 * DAY_MS ? "The last week" : "Older";
}

export class Sidebar {
  /** chat: what is done with conversations: open, start, rename, remove, add. */
  constructor(chat) {
    this.chat = chat;
    this.search = el("input", {type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.update()});
    this.list = el("div", {class: "list"});
    this.file = el("input", {type: "file", accept: ".json,application/json", hidden: true, onchange: () => this.readFile()});
    this.element = el("aside", {class: "sidebar", "aria-label": "Conversations"},
      el("button", {type: "button", class: "new", onclick: () => chat.start()}, icon("plus"), "New chat"),
      this.search, this.list,
      el("div", {class: "row"},
        el("button", {type: "button", class: "plain", onclick: () => this.file.click()}, icon("upload"), "Import"),
        el("button", {type: "button", class: "plain", onclick: () => this.saveAll()}, icon("download"), "Export all"),
        this.file));
  }

  update() {
    const words = this.search.value.trim().toLowerCase();
    const shown = this.chat.conversations.filter((one) => !words || matches(one, words));
    const parts = [];
    let age = null;
    for (const conversation of shown) {
      const next = ageOf(conversation.updated);
      if (next !== age) parts.push(el("h2", null, next), el("ul"));
      age = next;
      parts.at(-1).append(this.entry(conversation));
    }
    this.list.replaceChildren(...parts);
    this.search.hidden = this.chat.conversations.length < 6;
    if (words && !shown.length) this.list.append(el("p", {class: "note"}, "None has these words."));
  }

  entry(conversation) {
    const {chat} = this, isOpen = conversation.id === chat.conversation.id;
    const {title} = conversation;
    return el("li", {class: isOpen ? "open" : null},
      el("button", {type: "button", class: "title", title, "aria-current": isOpen ? "true" : null, onclick: () => chat.open(conversation)}, title),
      el("span", {class: "actions"},
        iconButton("edit", `Rename ${title}`, () => this.rename(conversation)),
        iconButton("download", `Export ${title}`, () => saveFile("conversation.json", exportText([conversation]))),
        iconButton("trash", `Delete ${title}`, () => this.remove(conversation))));
  }

  async rename(conversation) {
    const field = el("input", {value: conversation.title, "aria-label": "Name", autofocus: true});
    const title = await openDialog("Rename", (close) => el("form", {onsubmit: (event) => { event.preventDefault(); close(field.value.trim()); }},
      field,
      el("div", {class: "row end"}, el("button", {type: "button", onclick: () => close()}, "Cancel"), el("button", {class: "primary"}, "Rename"))));
    if (title) this.chat.rename(conversation, title);
  }

  async remove(conversation) {
    if (await confirmDialog("Delete", `\u201c${conversation.title}\u201d will be gone from this browser.`, "Delete")) this.chat.remove(conversation);
  }

  saveAll() {
    saveFile("conversations.json", exportText(this.chat.conversations));
  }

  async readFile() {
    const [file] = this.file.files;
    this.file.value = "";
    try {
      const found = importText(await file.text(), this.chat.conversations.map(({id}) => id));
      await this.chat.add(found);
      say(`${found.length} imported`);
    } catch (error) {
      openDialog("Import", (close) => [el("p", null, error.message), el("div", {class: "row end"}, el("button", {type: "button", onclick: () => close()}, "Close"))]);
    }
  }
}

const matches = (conversation, words) => conversation.title.toLowerCase().includes(words)
  || Object.values(conversation.nodes).some((node) => node.content.toLowerCase().includes(words));
