// Elements are made of text nodes alone: no string is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "readOnly"]);
const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  retry: "M19 8a8 8 0 1 0 1 6M20 4v5h-5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v6M14 11v6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4",
  key: "M14 10l6-6M17 7l3 3M9.5 19a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM12.7 11.3L14 10",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  help: "M9 9a3 3 0 1 1 4 2.8c-.8.4-1 1-1 2.2M12 17.5v.5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  close: "M6 6l12 12M18 6L6 18",
  play: "M8 5l11 7-11 7z",
  chat: "M4 5h16v11H10l-5 4v-4H4z",
  panel: "M4 5h16v14H4zM9 5v14",
};

/** An element. props: handlers (onclick), class, properties and attributes; children: texts, nodes, lists of them, nothing. */
export function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (PROPERTIES.has(name)) made[name] = value;
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function icon(name) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("viewBox", "0 0 24 24");
  drawn.setAttribute("class", "icon");
  drawn.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  drawn.append(path);
  return drawn;
}

/** A button that shows an icon alone. */
export function iconButton(name, label, onclick, props) {
  return el("button", {type: "button", class: "plain", title: label, "aria-label": label, onclick, ...props}, icon(name));
}

/** Puts a text into the clipboard, also where the page came over plain HTTP from another machine. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = el("textarea", {value: text, class: "unseen"});
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    say("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** Tells users of screen readers what has happened. */
export function say(text) {
  document.getElementById("status").textContent = text;
}

/** Offers a text as a file. */
export function saveFile(name, text) {
  const url = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  el("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A modal dialog; `fill(close)` gives its contents. The promise has what `close` is called with; undefined: dismissed. */
export function openDialog(title, fill) {
  return new Promise((resolve) => {
    let result;
    const close = (value) => { result = value; dialog.close(); };
    const dialog = el("dialog", {"aria-label": title, onclose: () => { dialog.remove(); resolve(result); }});
    dialog.append(el("h2", null, title), ...[fill(close)].flat());
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function confirmDialog(title, text, action) {
  return openDialog(title, (close) => [
    el("p", null, text),
    el("div", {class: "row end"},
      el("button", {type: "button", onclick: () => close()}, "Cancel"),
      el("button", {type: "button", class: "danger", autofocus: true, onclick: () => close(true)}, action)),
  ]);
}

/** An error in its place, with something to do about it. */
export function errorBox(error, retry, label = "Try again") {
  return el("div", {class: "error", role: "alert"},
    el("p", null, error.message, error.hint ? ` ${error.hint}` : ""),
    retry && el("button", {type: "button", onclick: retry}, icon("retry"), label));
}
