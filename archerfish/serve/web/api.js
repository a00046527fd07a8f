// Requests to the server. A 401 asks the user for an API key and sends the request again.

import {el, openDialog} from "./dom.js";

const KEY = "archerfish.key";
let key = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
let asking = null; // the dialog that is open
let isDeclined = false; // what is fetched in the background does not ask again

export class ApiError extends Error {
  constructor(message, {status = 0, code = "", hint = ""} = {}) {
    super(message);
    Object.assign(this, {name: "ApiError", status, code, hint});
  }
}

export const hasKey = () => key !== "";

function keep(value, isRemembered) {
  key = value;
  isDeclined = false;
  for (const [store, holds] of [[sessionStorage, !isRemembered], [localStorage, isRemembered]]) {
    if (holds && value) store.setItem(KEY, value);
    else store.removeItem(KEY);
  }
}

/** Asks for the API key; true if one was given. */
export function askForKey(reason = "Requests carry it in the header Authorization.") {
  asking ??= openDialog("API key", (close) => {
    const field = el("input", {type: "password", autocomplete: "off", "aria-label": "API key", value: key, autofocus: true});
    const remember = el("input", {type: "checkbox", checked: localStorage.getItem(KEY) !== null});
    const submit = (event) => {
      event.preventDefault();
      keep(field.value.trim(), remember.checked);
      close(true);
    };
    return el("form", {onsubmit: submit},
      el("p", {class: "note"}, reason),
      field,
      el("label", {class: "check"}, remember, "Remember it in this browser"),
      el("div", {class: "row end"},
        el("button", {type: "button", onclick: () => close()}, "Cancel"),
        el("button", {class: "primary"}, "Use")));
  }).then((isGiven = false) => {
    asking = null;
    isDeclined = !isGiven;
    return isGiven;
  });
  return asking;
}

async function errorOf(answer) {
  const seconds = answer.headers.get("retry-after");
  const hint = seconds ? `Try again in ${seconds} s.` : "";
  let found = null;
  try { found = (await answer.json()).error; } catch { /* not JSON */ }
  const told = typeof found === "string" ? {message: found} : found ?? {};
  return new ApiError(told.message ?? `The server answered ${answer.status}.`, {status: answer.status, code: told.code, hint});
}

async function request(path, {body, signal, asks = true} = {}) {
  for (;;) {
    const used = key, headers = {};
    if (used) headers.Authorization = `Bearer ${used}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, {
        method: body === undefined ? "GET" : "POST", headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.", {code: "unreachable", hint: "See whether it still runs."});
    }
    if (answer.ok) return answer;
    const error = await errorOf(answer);
    if (answer.status !== 401) throw error;
    if (key === used && !(asks && await askForKey(error.message))) throw error;
  }
}

export async function get(path) {
  return (await request(path, {asks: !isDeclined})).json();
}

export async function post(path, body, {signal} = {}) {
  return (await request(path, {body, signal})).json();
}

/** The data of the events of an answer. onremark: called with what the server says about the request's parameters. */
export async function* stream(path, body, {signal, onremark} = {}) {
  const answer = await request(path, {body, signal});
  const remark = answer.headers.get("x-archerfish-remark");
  if (remark && onremark) onremark(remark);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const data = JSON.parse(line.slice(6));
        if (data.error) throw new ApiError(data.error.message, {code: data.error.code});
        yield data;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection broke off.", {code: "broken_off"});
  } finally {
    reader.cancel().catch(() => {});
  }
}
