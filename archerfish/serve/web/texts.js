import {el} from "./dom.js";

export function mount(section) {
  section.append(el("div", {class: "page"}, el("p", {class: "note"}, "Nothing here yet.")));
}
