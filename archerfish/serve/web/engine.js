import {el} from "./dom.js";

export function mount(section) {
  section.append(el("div", {class: "page"}, el("h1", null, "Engine"), el("p", {class: "note"}, "Nothing here yet.")));
}
